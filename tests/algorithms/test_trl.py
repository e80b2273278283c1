"""Advantages, corrections and losses against TRL's own trainers, on the same responses of the same model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.test_model import TINY
from vime.algorithms.advantages import group_advantages, leave_one_out_advantages
from vime.algorithms.aggregation import Aggregation, sample_sums, sample_token_weights, weighted_sum
from vime.algorithms.importance import Correction, importance_weights, log_ratios
from vime.algorithms.kl import kl_estimate
from vime.algorithms.losses import cispo_loss, policy_loss, sequence_policy_loss
from vime.models.tiny import make_tiny

PROMPTS, EACH, LONGEST = 2, 4, 9
REWARDS = [0.0, 1.0, 0.25, 0.5, 0.1, 0.1, 2.0, -1.0]
BOUNDS = 0.7, 1.4


@dataclass(frozen=True)
class Peer:
    """TRL's trainer with a batch that it has scored, and the places [8, longest] of its trained tokens."""

    trainer: Any
    inputs: dict[str, Any]
    mask: Tensor

    def flat(self, padded: Tensor) -> Tensor:
        """[8, longest] -> [T], the layout of ours."""
        return padded.expand_as(self.mask)[self.mask]

    @property
    def owners(self) -> Tensor:
        """[T]: the response of each token."""
        return torch.arange(len(self.mask))[:, None].expand_as(self.mask)[self.mask]


def _responses(seed: int = 0) -> dict[str, list[list[Any]]]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, LONGEST + 1, PROMPTS * EACH)
    return {
        "prompt_ids": [[5, 6, 7 + i // EACH] for i in range(PROMPTS * EACH)],
        "completion_ids": [generator.integers(10, 250, n).tolist() for n in lengths],
        # Near the model's own, which are about ln(1/264).
        "logprobs": [[float(x) for x in generator.normal(-5.6, 0.5, n)] for n in lengths],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    make_tiny(TINY.model_copy(update={"initializer_range": 0.08}), folder / "hf")
    return folder


def _trainer(kind: str, folder: Path, **settings: Any) -> Any:
    import trl
    from datasets import Dataset

    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=PROMPTS * EACH,
        num_generations=EACH,
        max_completion_length=LONGEST,
        beta=0.1,
        temperature=0.7,
        **settings,
    )
    return getattr(trl, f"{kind}Trainer")(
        model=str(folder / "hf"),
        reward_funcs=lambda completions, **rest: REWARDS,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
    )


@pytest.fixture(scope="module")
def grpo(folder: Path) -> Peer:
    """A GRPOTrainer whose batch came from an engine with other probabilities, and whose policies all differ."""
    trainer = _trainer("GRPO", folder)
    trainer.rollout_func = lambda prompts, trainer: _responses()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    # What an engine's logprobs need, without an engine: it is the rollout that calls it.
    trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "x"}] * 8)
    inputs["old_per_token_logps"] += 0.3 * torch.randn(inputs["old_per_token_logps"].shape, generator=generator)
    trainer.use_vllm, trainer.current_gradient_accumulation_steps = False, 1
    return Peer(trainer, inputs, inputs["completion_mask"].bool())


def test_grpo_advantages(grpo: Peer) -> None:
    groups = torch.arange(PROMPTS).repeat_interleave(EACH)
    ours = group_advantages(torch.tensor(REWARDS), groups, True)
    # TRL adds 1e-4 to the deviation.
    torch.testing.assert_close(ours, grpo.inputs["advantages"], atol=1e-6, rtol=1e-3)
    grpo.trainer.scale_rewards = "none"
    try:
        inputs = grpo.trainer._generate_and_score_completions([{"prompt": "x"}] * 8)
    finally:
        grpo.trainer.scale_rewards = "group"
    ours = group_advantages(torch.tensor(REWARDS), groups, False)
    torch.testing.assert_close(ours, inputs["advantages"])


def test_rloo_advantages_with_the_kl_in_the_reward(folder: Path) -> None:
    trainer = _trainer("RLOO", folder)
    responses = _responses()
    trainer._generate = lambda prompts: _as_rloo(trainer, responses)
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter *= 1.1
    inputs = trainer._generate_and_score_completions([{"prompt": "x"}] * 8)
    mask = inputs["completion_mask"].bool()
    owners = torch.arange(8)[:, None].expand_as(mask)[mask]
    with torch.no_grad():
        new, reference = (
            _logprobs(trainer, model, inputs, entropy=False)[0][mask] for model in (trainer.model, trainer.ref_model)
        )
    kl = kl_estimate(new, reference, "k1", torch.ones_like(new))
    assert float(kl.abs().mean()) > 0.01
    rewards = torch.tensor(REWARDS) - 0.1 * sample_sums(kl, owners, 8)
    ours = leave_one_out_advantages(rewards, torch.arange(2).repeat_interleave(4), False)
    torch.testing.assert_close(ours, inputs["advantages"], atol=1e-5, rtol=1e-5)


def _as_rloo(trainer: Any, responses: dict[str, list[list[Any]]]) -> Any:
    ids = responses["completion_ids"]
    texts = trainer.processing_class.batch_decode(ids)
    return responses["prompt_ids"], ids, texts


@pytest.mark.parametrize("correction", ["truncated", "token_mask", "sequence_mask"])
def test_importance_weights(grpo: Peer, correction: Correction) -> None:
    trainer, (low, high) = grpo.trainer, BOUNDS
    trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    trainer.vllm_importance_sampling_mode = {"truncated": "token_truncate"}.get(correction, correction)
    trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = low, high
    try:
        inputs = trainer._generate_and_score_completions([{"prompt": "x"}] * 8)
    finally:
        trainer.use_vllm = False
    new, rollout = grpo.flat(inputs["old_per_token_logps"]), grpo.flat(inputs["sampling_per_token_logps"])
    ratio = log_ratios(new, rollout, torch.ones_like(new))
    of_sample = sample_sums(ratio, grpo.owners, 8)[grpo.owners]
    weights, outside = importance_weights(ratio, of_sample, correction, low, high)
    assert outside.any()
    torch.testing.assert_close(weights, grpo.flat(inputs["importance_sampling_ratio"]), atol=1e-5, rtol=1e-4)


Ours = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(new, old, advantages [T], owners) -> loss [T]"""


def _clip(new: Tensor, old: Tensor, advantages: Tensor, owners: Tensor) -> Tensor:
    return policy_loss(new, old, advantages, torch.ones_like(new), 0.2, 0.28)[0]


def _gspo(new: Tensor, old: Tensor, advantages: Tensor, owners: Tensor) -> Tensor:
    return sequence_policy_loss(new, old, advantages, torch.ones_like(new), owners, 0.05, 0.08)[0]


LOSSES: dict[str, tuple[dict[str, Any], Ours, Aggregation]] = {
    "grpo": ({"loss_type": "grpo"}, _clip, "sequence_mean"),
    "bnpo": ({"loss_type": "bnpo"}, _clip, "token_mean"),
    "dapo": ({"loss_type": "dapo"}, _clip, "token_mean"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, _clip, "constant"),
    "dual": (
        {"loss_type": "bnpo", "delta": 1.5},
        lambda new, old, advantages, owners: policy_loss(
            new, old, advantages, torch.ones_like(new), 0.2, 0.28, clip_dual=1.5
        )[0],
        "token_mean",
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
        _gspo,
        "sequence_mean",
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        lambda new, old, advantages, owners: cispo_loss(new, old, advantages, torch.ones_like(new), 1.0, 0.2)[0],
        "token_mean",
    ),
}
DEFAULTS: dict[str, Any] = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "importance_sampling_level": "token",
    "beta": 0.0,
    "entropy_coef": 0.0,
    "delta": None,
    "use_bias_correction_kl": False,
    "_entropy_bonus_enabled": False,
}


@pytest.mark.parametrize(
    "more",
    [{}, {"beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": True}, {"entropy_coef": 0.01}],
    ids=["", "kl", "kl_unbiased", "entropy"],
)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients(grpo: Peer, name: str, more: dict[str, Any]) -> None:
    settings, ours, aggregation = LOSSES[name]
    trainer, inputs = grpo.trainer, grpo.inputs
    if "entropy_coef" in more and name != "bnpo":
        pytest.skip("TRL averages the bonus over tokens whatever the loss: equal where the loss does too")
    if "use_bias_correction_kl" in more and name == "gspo":
        pytest.skip("TRL multiplies by the response's ratio there, vime by the token's")
    for key, value in (DEFAULTS | settings | more).items():
        setattr(trainer.args if key in ("delta", "use_bias_correction_kl") else trainer, key, value)
    trainer._entropy_bonus_enabled = trainer.entropy_coef > 0
    expected, wanted = _gradients(trainer.model, lambda: trainer._compute_loss(trainer.model, inputs))

    def loss() -> Tensor:
        logprobs, entropies = _logprobs(trainer, trainer.model, inputs)
        new, old = grpo.flat(logprobs), grpo.flat(inputs["old_per_token_logps"])
        trained = sample_sums(torch.ones_like(new), grpo.owners, 8)
        weights = sample_token_weights(aggregation, trained, LONGEST)[grpo.owners]
        per_token = ours(new, old, grpo.flat(inputs["advantages"][:, None]), grpo.owners)
        if trainer.beta:
            reference = grpo.flat(inputs["ref_per_token_logps"])
            sampled = old if trainer.args.use_bias_correction_kl else None
            mask = torch.ones_like(new)
            per_token = per_token + trainer.beta * kl_estimate(new, reference, "k3", mask, old_logprobs=sampled)
        if trainer.entropy_coef:
            per_token = per_token - trainer.entropy_coef * grpo.flat(entropies)
        return weighted_sum(per_token, weights)

    value, seen = _gradients(trainer.model, loss)
    assert abs(expected) > 1e-4
    assert value == pytest.approx(expected, abs=1e-6, rel=1e-5)
    assert max(float(gradient.abs().max()) for gradient in wanted) > 1e-3
    for one, other in zip(seen, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def _logprobs(trainer: Any, model: Any, inputs: dict[str, Any], entropy: bool = True) -> tuple[Tensor, Tensor]:
    """[8, longest] logprobs and entropies, by TRL's own pass."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    result = trainer._get_per_token_logps_and_entropies(
        model, ids, mask, inputs["completion_ids"].shape[1], compute_entropy=entropy
    )
    return result[0], result[1]


def _gradients(model: Any, loss: Callable[[], Tensor]) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    value = loss()
    value.backward()
    return float(value.detach()), [parameter.grad.clone() for parameter in model.parameters()]
