"""Every update rule gives the same step in every layout, and runs no pass that its result does not need."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pages import printed_file
from tests.training.ranks import Ranks, tiny_config
from tests.training.test_model import TINY
from tests.training.test_step import ADAM_EPS, LEARNING_RATE, write_batch
from vime.algorithms.metrics import Metric
from vime.buffer.chunk import Chunk, write_chunk
from vime.buffer.manifest import CHUNKS, Manifest, entries
from vime.buffer.sample import Group, Sample
from vime.errors import UserError
from vime.models.tiny import make_tiny
from vime.run.directory import RunDir

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2_small_microbatches": (2, {"max_tokens_per_microbatch": 40}),
    "tp2_sp": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2, "max_tokens_per_microbatch": 60}),
}
# For rules that add up over a response, and for the critic.
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "pp2_virtual2": (2, {"pipeline_parallel": 2, "virtual_stages": 2, "max_tokens_per_microbatch": 60}),
}
# Ratios and weights that are not 1: half the responses are a version behind, the others in their first half, and the
# rollout logprobs are random.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"normalize_std": False, "clip_dual": 2.0},
    "rloo_kl_in_reward": {"advantage": "rloo", "kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus",
        "gamma": 0.9,
        "kl_coefficient": 0.1,
        "kl_in": "reward",
        "kl_clamp": 0.01,
    },
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline", "aggregation": "constant"},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.5, "clip_high": 3.0},
    "cispo_truncated": {"loss": "cispo", "importance_sampling": "truncated", "old_logprobs": "trainer"},
    "sequence_mask": {"importance_sampling": "sequence_mask", "old_logprobs": "trainer", "importance_high": 50.0},
    "rollout": {"old_logprobs": "rollout", "kl_coefficient": 0.1, "kl_clamp": 0.5, "entropy_coefficient": 0.01},
    "teacher": {"teacher": "TEACHER", "teacher_coefficient": 0.5},
    "other_reference": {"reference": "TEACHER", "kl_coefficient": 0.1, "kl_unbiased": True, "old_logprobs": "rollout"},
    "ppo": {"name": "ppo", "gae_lambda": 0.9, "gamma": 0.99, "critic": {"learning_rate": 1e-3, "updates": 2}},
    "minibatches": {"minibatches": 2, "old_logprobs": "trainer", "aggregation": "sequence_mean", "kl_coefficient": 0.1},
    "ppo_minibatches": {"name": "ppo", "minibatches": 4, "critic": {"learning_rate": 1e-3, "updates": 2}},
    "custom": {
        "advantage": "tests.training.test_algorithms:best_of_group",
        "loss": "tests.training.test_algorithms:plain_loss",
    },
}


def best_of_group(rewards: Tensor, groups: Tensor) -> Tensor:
    """A user's advantage: 1 for the best responses to a prompt, 0 for the others."""
    return torch.stack(
        [(reward >= rewards[groups == group].max()).float() for reward, group in zip(rewards, groups, strict=True)]
    )


def plain_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """A user's loss: the policy gradient without ratios."""
    return -advantages * logprobs


def measured_loss(logprobs: Tensor, advantages: Tensor, samples: Tensor) -> tuple[Tensor, Tensor, dict[str, Metric]]:
    """A user's loss with metrics of its own, one by each reduction."""
    values = samples.float()
    return (
        -advantages * logprobs,
        torch.zeros_like(samples, dtype=torch.bool),
        {
            "train/toy_sum": Metric(torch.ones_like(values), "sum"),
            "train/toy_mean": Metric(advantages),
            "train/toy_max": Metric(advantages, "max"),
            "train/toy_min": Metric(advantages, "min"),
            "train/toy_of_none": Metric(advantages, "max", where=values < 0),
        },
    )


def nothing(rewards: Tensor) -> Tensor:
    """No reward moves the policy."""
    return torch.zeros_like(rewards)


def wrong_shape(rewards: Tensor) -> Tensor:
    """A user's mistake."""
    return rewards[:2]


def broken(rewards: Tensor) -> Tensor:
    """Another one."""
    raise KeyError("bonus")


def run_steps(
    rank: int,
    store: Any,
    world_size: int,
    folder: Path,
    manifest: Manifest,
    algorithm: dict[str, Any],
    training: dict[str, Any],
    steps: int = 2,
) -> dict[str, Any]:
    """Steps on one batch; the second one sees values and a reference that differ from the policy's own."""
    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.learner import Learner
    from vime.training.weights import hf_export

    algorithm = {key: str(folder / "teacher") if value == "TEACHER" else value for key, value in algorithm.items()}
    config = tiny_config(
        algorithm=algorithm,
        training={"ranks": world_size, "learning_rate": LEARNING_RATE, "adam_eps": ADAM_EPS, **training},
    )
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, folder / "hf")
    passes: list[str] = []
    for name in ("_score", "reference", "teacher", "critic"):
        part = getattr(learner, name)
        owner, method = {
            "_score": (learner, "_score"),
            "critic": (part, "values"),
        }.get(name, (part, "logprobs"))
        if owner is not None:
            _count(owner, method, name, passes)
    metrics = []
    for _ in range(steps):
        loaded = batch.load(manifest, BufferReader(RunDir(folder), config.buffer), config, version=1)
        metrics.append(learner.train(loaded))
    weights = dict(hf_export.export(learner.policy, torch.float32)) if parallel.is_leading() else {}
    return {"metrics": metrics, "weights": weights, "passes": passes}


def _count(owner: Any, method: str, name: str, passes: list[str]) -> None:
    function = getattr(owner, method)

    def counted(*arguments: Any) -> Any:
        passes.append(name)
        return function(*arguments)

    setattr(owner, method, counted)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("algorithms")
    make_tiny(TINY, folder / "hf")
    make_tiny(TINY.model_copy(update={"seed": 1, "layers": 2}), folder / "teacher")
    return folder, write_batch(folder, logprob=(-math.log(264), 0.7), spanning=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_is_the_same_in_every_layout(ranks: Ranks, prepared: tuple[Path, Manifest], algorithm: str) -> None:
    (expected,) = ranks.run(1, run_steps, *prepared, ALGORITHMS[algorithm], {})
    assert all(np.isfinite(value) for metrics in expected["metrics"] for value in metrics.values())
    assert expected["metrics"][0]["train/grad_norm"] > 1e-3
    assert expected["metrics"][0] != expected["metrics"][1]
    more = MORE_LAYOUTS if algorithm in ("ppo", "gspo", "reinforce_plus_plus") else {}
    for layout, (world_size, training) in (LAYOUTS | more).items():
        results = ranks.run(world_size, run_steps, *prepared, ALGORITHMS[algorithm], training)
        for result in results:
            for seen, wanted in zip(result["metrics"], expected["metrics"], strict=True):
                assert seen == pytest.approx(wanted, abs=2e-5, rel=2e-5), layout
        for name, tensor in expected["weights"].items():
            assert (results[0]["weights"][name] - tensor).abs().max() < 1e-5, (layout, name)


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({}, []),
        ({"advantage": "reinforce_plus_plus", "loss": "gspo", "importance_sampling": "truncated"}, []),
        ({"entropy_coefficient": 0.1, "old_logprobs": "trainer"}, []),
        ({"kl_coefficient": 0.1}, ["reference"]),
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, ["_score", "reference"]),
        ({"kl_in": "reward"}, []),
        ({"name": "ppo"}, []),
        ({"name": "ppo", "critic": {"updates": 2}}, ["critic"]),
        ({"name": "ppo", "minibatches": 2}, ["_score", "critic"]),
        ({"minibatches": 2}, ["_score"]),
        ({"teacher": "TEACHER"}, ["teacher"]),
    ],
)
def test_no_pass_runs_that_the_result_does_not_need(
    ranks: Ranks, prepared: tuple[Path, Manifest], algorithm: dict[str, Any], passes: list[str]
) -> None:
    (result,) = ranks.run(1, run_steps, *prepared, algorithm, {}, 1)
    assert result["passes"] == passes


def test_every_correction_is_measured_when_it_is_off(ranks: Ranks, prepared: tuple[Path, Manifest]) -> None:
    off: dict[str, Any] = {"old_logprobs": "trainer", "importance_low": 0.1, "importance_high": 0.9}
    (plain,) = ranks.run(1, run_steps, *prepared, off, {}, 1)
    seen = plain["metrics"][0]
    assert 0.1 < seen["train/tis_clipfrac"] < 0.9
    assert 0.1 < seen["train/tis_sequence_clipfrac"] <= 1
    assert 0.1 < seen["train/tis"] < 2
    assert seen["train/train_rollout_kl"] > 0.1
    assert seen["train/ois"] == 1
    assert seen["train/ppo_kl"] == 0
    for correction in ("truncated", "token_mask", "sequence_mask"):
        (corrected,) = ranks.run(1, run_steps, *prepared, {**off, "importance_sampling": correction}, {}, 1)
        names = [name for name in seen if "tis" in name or "rollout" in name]
        assert len(names) == 6
        assert {name: corrected["metrics"][0][name] for name in names} == {name: seen[name] for name in names}
        assert corrected["metrics"][0]["train/pg_loss"] != seen["train/pg_loss"]


def test_ratios_of_later_minibatches_are_to_the_policy_before_the_step(
    ranks: Ranks, prepared: tuple[Path, Manifest]
) -> None:
    (one,) = ranks.run(1, run_steps, *prepared, {"old_logprobs": "trainer"}, {}, 1)
    (two,) = ranks.run(1, run_steps, *prepared, {"old_logprobs": "trainer", "minibatches": 2}, {}, 1)
    assert (one["metrics"][0]["train/ppo_kl"], one["metrics"][0]["train/pg_clipfrac"]) == (0, 0)
    assert abs(two["metrics"][0]["train/ppo_kl"]) > 1e-5
    assert two["metrics"][0]["train/lr"] == one["metrics"][0]["train/lr"]
    # These describe the batch and not the update: they move only by how tokens are weighed.
    for name in ("train/train_rollout_kl", "train/tis"):
        assert two["metrics"][0][name] == pytest.approx(one["metrics"][0][name], rel=0.1), name


def test_the_reference_follows_the_policy(ranks: Ranks, prepared: tuple[Path, Manifest]) -> None:
    (fixed,) = ranks.run(1, run_steps, *prepared, {"kl_coefficient": 1e-3}, {}, 3)
    (refreshed,) = ranks.run(1, run_steps, *prepared, {"kl_coefficient": 1e-3, "reference_refresh": 2}, {}, 3)
    kl = [[metrics["train/kl_loss"] for metrics in result["metrics"]] for result in (fixed, refreshed)]
    assert kl[0][0] == kl[1][0] == pytest.approx(0, abs=1e-7)
    assert kl[0][1] == kl[1][1] > 1e-7
    assert kl[1][2] == pytest.approx(0, abs=1e-7)
    assert kl[0][2] > kl[0][1]


def test_values_that_come_with_the_update_are_those_of_a_pass_before_it(
    ranks: Ranks, prepared: tuple[Path, Manifest]
) -> None:
    rule = {
        "name": "ppo",
        "gae_lambda": 0.9,
        "kl_coefficient": 0.1,
        "kl_in": "reward",
        "critic": {"learning_rate": 1e-3},
    }
    for world_size, training in ((1, {}), LAYOUTS["pp2"]):
        once = ranks.run(world_size, run_steps, *prepared, rule, training, 3)
        twice = ranks.run(world_size, _two_passes, *prepared, rule, training, 3)
        assert (once[0]["passes"].count("critic"), twice[0]["passes"].count("critic")) == (0, 3)
        for one, other in zip(once[0]["metrics"], twice[0]["metrics"], strict=True):
            assert one == pytest.approx(other, abs=1e-6, rel=1e-5)


def _two_passes(rank: int, store: Any, world_size: int, *arguments: Any) -> dict[str, Any]:
    from vime.training.critic import Critic

    before = Critic.once
    Critic.once = False  # type: ignore[assignment, method-assign]
    try:
        return run_steps(rank, store, world_size, *arguments)
    finally:
        Critic.once = before  # type: ignore[method-assign]


def test_the_critic_learns_alone_first(ranks: Ranks, prepared: tuple[Path, Manifest]) -> None:
    critic = {"critic_only_steps": 2, "learning_rate": 3e-3, "value_clip": 10.0}
    (result,) = ranks.run(1, run_steps, *prepared, {"name": "ppo", "critic": critic}, {}, 3)
    first, second, third = result["metrics"]
    assert "train/pg_loss" not in second
    assert third["train/pg_loss"] != 0
    assert first["train/value_loss"] > second["train/value_loss"] > third["train/value_loss"]
    # The value head begins with 0 everywhere: it explains nothing, and says so.
    assert (first["train/explained_variance"], first["train/value_mean"]) == (pytest.approx(0, abs=1e-6), 0)
    assert third["train/explained_variance"] > 0
    (only,) = ranks.run(1, run_steps, *prepared, {"name": "ppo", "critic": critic}, {}, 2)
    from safetensors.torch import load_file

    for name, tensor in load_file(prepared[0] / "hf" / "model.safetensors").items():
        assert torch.equal(only["weights"][name], tensor), name


@pytest.mark.parametrize("place", [0, 1])
def test_a_minibatch_without_a_trained_token_makes_no_update(
    ranks: Ranks, prepared: tuple[Path, Manifest], tmp_path: Path, place: int
) -> None:
    """The step is then the one of the other minibatch alone, but for how its samples are normalised."""
    folder, _ = prepared
    rule = {"name": "ppo", "minibatches": 2, "advantage": "gae", "critic": {"learning_rate": 1e-3, "updates": 2}}

    def silent(group: Group) -> Group:
        if (group.index >= 2) == place:
            return group
        samples = tuple(replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in group.samples)
        return replace(group, samples=samples)

    manifest = judged_batch(folder, tmp_path, silent)
    trained = tuple(sample for sample in manifest.samples if sample.masked_in)
    assert {sample.group for sample in trained} == ({2, 3} if place else {0, 1})
    alone = manifest.model_copy(update={"samples": trained})
    (expected,) = ranks.run(1, run_steps, tmp_path, alone, {**rule, "minibatches": 1}, {})
    for world_size, training in ((1, {}), LAYOUTS["pp2"]):
        for result in ranks.run(world_size, run_steps, tmp_path, manifest, rule, training):
            for seen, wanted in zip(result["metrics"], expected["metrics"], strict=True):
                assert seen.pop("train/skipped_minibatches") == 1
                assert wanted["train/skipped_minibatches"] == 0
                assert seen == pytest.approx({name: wanted[name] for name in seen}, abs=2e-5, rel=2e-5)


def test_a_warm_up_reaches_its_peak_at_its_last_step_and_the_policy_s_schedule_ends(
    ranks: Ranks, prepared: tuple[Path, Manifest]
) -> None:
    critic = {"learning_rate": 1e-3, "warmup_steps": 2, "critic_only_steps": 2}
    training = {"learning_rate": 4e-3, "warmup_steps": 2, "schedule": "linear", "steps": 6}
    (result,) = ranks.run(1, run_steps, *prepared, {"name": "ppo", "critic": critic}, training, 6)
    policy = [metrics["train/lr"] for metrics in result["metrics"] if "train/lr" in metrics]
    # Four steps, two of them the warm-up; after the decay's three steps from the peak, which come to 0 with step 7.
    assert policy == pytest.approx([2e-3, 4e-3, 4e-3 * 2 / 3, 4e-3 / 3])
    rates = [metrics["train/critic_lr"] for metrics in result["metrics"]]
    assert rates == pytest.approx([5e-4, 1e-3, 8e-4, 6e-4, 4e-4, 2e-4])


def test_an_own_algorithm_trains_as_printed(ranks: Ranks, prepared: tuple[Path, Manifest], tmp_path: Path) -> None:
    (tmp_path / "my_algorithm.py").write_text(printed_file("my_algorithm.py"), encoding="utf-8")
    own = {"advantage": "my_algorithm:advantage", "loss": "my_algorithm:loss"}
    results = ranks.run(2, _own, *prepared, own, {}, 2, tmp_path)
    for result in results:
        first, second = result["metrics"]
        assert first["train/grad_norm"] > 1e-4
        assert second["train/pg_loss"] != first["train/pg_loss"]
    assert results[0]["metrics"] == results[1]["metrics"]


def _own(rank: int, store: Any, world_size: int, *arguments: Any) -> dict[str, Any]:
    sys.path.insert(0, str(arguments[-1]))
    try:
        return run_steps(rank, store, world_size, *arguments[:-1])
    finally:
        sys.path.pop(0)


def test_a_loss_s_own_metrics_are_reduced_over_all_tokens(ranks: Ranks, prepared: tuple[Path, Manifest]) -> None:
    """The advantages of a response are those of its reward, so what each reduction gives is known."""
    rule = {"loss": "tests.training.test_algorithms:measured_loss", "normalize_std": False}
    trained = np.array([sample.masked_in for sample in prepared[1].samples])
    rewards = np.array([sample.reward for sample in prepared[1].samples]).reshape(-1, 2)
    advantages = (rewards - rewards.mean(1, keepdims=True)).flatten()
    expected = {
        "train/toy_sum": trained.sum(),
        "train/toy_mean": (advantages * trained).sum() / trained.sum(),
        "train/toy_max": advantages.max(),
        "train/toy_min": advantages.min(),
    }
    for world_size, training in ((1, {}), LAYOUTS["dp2_small_microbatches"], LAYOUTS["pp2"]):
        for result in ranks.run(world_size, run_steps, *prepared, rule, training, 1):
            seen = {name: value for name, value in result["metrics"][0].items() if "toy" in name}
            assert seen == pytest.approx(expected, abs=1e-6), training


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        ({"advantage": "tests.training.test_algorithms:wrong_shape"}, r"returned a tensor \[2\]; .* tensor \[8\]"),
        ({"advantage": "tests.training.test_algorithms:broken"}, r"test_algorithms:broken raised KeyError: 'bonus'"),
        ({"loss": "tests.training.test_algorithms:best_of_group"}, r"asks for 'rewards'; there are logprobs, old_log"),
        ({"loss": "tests.training.test_algorithms:best"}, r"algorithm.loss=.* has no best$"),
    ],
)
def test_a_mistake_in_custom_logic_is_named(
    ranks: Ranks, prepared: tuple[Path, Manifest], algorithm: dict[str, Any], line: str
) -> None:
    (message,) = ranks.run(1, _refusal, *prepared, algorithm)
    assert message.startswith(f"algorithm.{next(iter(algorithm))}=")
    assert re.search(line, message), message


def test_a_teacher_of_other_words_is_refused(ranks: Ranks, prepared: tuple[Path, Manifest], tmp_path: Path) -> None:
    shutil.copytree(prepared[0] / "teacher", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    (message,) = ranks.run(1, _refusal, *prepared, {"teacher": str(tmp_path / "other")})
    assert f"algorithm.teacher={tmp_path}/other has a vocabulary of 300 tokens and the policy one of 264" in message


def judged_batch(folder: Path, target: Path, judge: Callable[[Group], Group]) -> Manifest:
    """The batch of `folder` as a generator with a served teacher would have left it in `target`, with its models."""
    chunk = Chunk.open(folder / "buffer" / CHUNKS / "c0.safetensors")
    groups = [
        judge(Group(one.uid, one.index, tuple(chunk.sample(i) for i in range(one.first, one.first + one.count))))
        for one in chunk.groups
    ]
    for name in ("hf", "teacher"):
        (target / name).symlink_to(folder / name)
    (target / "buffer" / CHUNKS).mkdir(parents=True)
    info = write_chunk(target / "buffer" / CHUNKS, "c0.safetensors", groups)
    return Manifest(step=1, version=0, chunks=(info,), samples=tuple(entries("c0.safetensors", groups)))


def _score(rank: int, store: Any, world_size: int, folder: Path, samples: list[Sample]) -> list[Tensor]:
    from vime.training import parallel
    from vime.training.learner import Learner

    config = tiny_config(training={"ranks": world_size})
    parallel.initialize(config, store, rank, world_size)
    return Learner(config, folder).score(samples, 1.0)


def test_a_served_teacher_teaches_what_a_loaded_one_does(
    ranks: Ranks, prepared: tuple[Path, Manifest], tmp_path: Path
) -> None:
    folder, loaded = prepared

    def judge(group: Group) -> Group:
        (scores,) = ranks.run(1, _score, folder / "teacher", list(group.samples))
        samples = []
        for sample, logprobs in zip(group.samples, scores, strict=True):
            given = np.full(sample.response_length, np.nan, np.float32)  # what is masked means nothing
            given[sample.loss_mask == 1] = logprobs.numpy()
            samples.append(replace(sample, teacher_logprobs=given))
        return replace(group, samples=tuple(samples))

    manifest = judged_batch(folder, tmp_path, judge)
    served = {**ALGORITHMS["teacher"], "teacher": "http://teacher:8000"}
    (expected,) = ranks.run(1, run_steps, folder, loaded, ALGORITHMS["teacher"], {})
    assert abs(expected["metrics"][0]["train/opd_reverse_kl"]) > 0.01
    for layout, (world_size, training) in ({"one": (1, {})} | LAYOUTS | {"cp2": MORE_LAYOUTS["cp2"]}).items():
        for result in ranks.run(world_size, run_steps, tmp_path, manifest, served, training):
            assert result["passes"] == [], "the trainer has no teacher of its own"
            for seen, wanted in zip(result["metrics"], expected["metrics"], strict=True):
                assert seen == pytest.approx(wanted, abs=2e-5, rel=2e-5), layout
    with pytest.raises(
        AssertionError, match=r"samples of the batch have no logprobs of algorithm.teacher=http://teacher"
    ):
        ranks.run(1, run_steps, folder, loaded, served, {})


def test_distillation_goes_to_the_teacher(ranks: Ranks, prepared: tuple[Path, Manifest]) -> None:
    """No reward moves the policy, only the teacher: on these tokens the two come together."""
    rule = {"teacher": "TEACHER", "advantage": "tests.training.test_algorithms:nothing"}
    (result,) = ranks.run(1, run_steps, *prepared, rule, {"learning_rate": 3e-3}, 6)
    gaps = [metrics["train/opd_reverse_kl"] for metrics in result["metrics"]]
    assert result["metrics"][0]["train/grad_norm"] > 1e-3
    assert gaps[-1] < gaps[0] - 0.05, gaps


def _refusal(rank: int, store: Any, world_size: int, folder: Path, manifest: Manifest, algorithm: Any) -> str:
    try:
        run_steps(rank, store, world_size, folder, manifest, algorithm, {}, 1)
    except UserError as error:
        return str(error)
    return "it trained"
