"""The update rule of a run: what a recipe may say under `algorithm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from vime.algorithms.advantages import ADVANTAGES
from vime.algorithms.losses import LOSSES
from vime.algorithms.table import described
from vime.config.import_path import ImportPath
from vime.config.section import Section, UrlOrPath

if TYPE_CHECKING:
    Advantage = str
    Loss = str
else:
    Advantage, Loss = Literal[tuple(ADVANTAGES)], Literal[tuple(LOSSES)]

TEACHER_KEY = "VIME_TEACHER_API_KEY"
"""Environment variable with the API key of a teacher that is a server. It is in no file and on no command line."""


class Critic(Section):
    """ppo only: the model with a value head that estimates what reward is still to come."""

    path: Path | None = None
    """A Hugging Face folder of the policy's tokenizer to start from. Default: the initial policy's weights."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate; the rest of its optimizer's settings are those of `training`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear learning-rate warm-up: step w of w has `learning_rate`, step 1 a w-th of it."""
    critic_only_steps: int = Field(0, ge=0)
    """First steps of the run in which the critic alone learns: the policy, and its version's weights, stay. The
    policy's learning-rate schedule begins after them and ends with the run."""
    updates: int = Field(1, ge=1)
    """How often a batch is gone through, with an update by each of its minibatches."""
    value_clip: float = Field(0.2, gt=0)
    """The loss takes no credit for a value that moves further than this from what it was before the step."""


class Algorithm(Section):
    """The update rule."""

    name: Literal["grpo", "ppo", "sft"] = "grpo"
    """grpo: policy gradient without a critic, by `advantage`. ppo: with one. sft: demonstrations, without engines."""
    advantage: Advantage | ImportPath | None = Field(
        None,
        description=described(
            "How rewards become advantages: one of these, or module:function. Default: grpo; with name=ppo it is gae.",
            ADVANTAGES,
        ),
    )
    normalize_std: bool | None = None
    """grpo, rloo: divide a group's centred rewards by their spread; others: make the batch's advantages zero-mean and
    unit-variance. Default: as published, so rloo does not and all others do."""
    gamma: float = Field(1.0, gt=0, le=1)
    """gae, reinforce_plus_plus: discount of a token's reward for each token before it."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """gae: 1 trusts rewards alone, 0 the critic's next value alone."""
    loss: Loss | ImportPath = Field(
        "clip", description=described("Policy loss: one of these, or module:function.", LOSSES)
    )
    clip_low: float = Field(0.2, ge=0, le=1)
    """The probability ratio is clipped below at 1 - clip_low. gspo was published with 3e-4, cispo with 1."""
    clip_high: float = Field(0.28, ge=0)
    """The probability ratio is clipped above at 1 + clip_high. gspo was published with 4e-4."""
    clip_dual: float | None = Field(None, gt=1)
    """clip: with a negative advantage the loss counts ratios up to this one (dual clip, 3 as published). null: all."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the reference policy. 0 loads no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether that divergence is added to the loss, or taken from each token's reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence. In a reward k1 is the usual one; in a loss its gradient is zero on average."""
    kl_clamp: float | None = Field(None, gt=0)
    """Largest |estimate| of a token, before `kl_unbiased`; a token beyond has no gradient of it. null: all."""
    kl_unbiased: bool = False
    """In the loss, multiply a token's estimate by its probability ratio: its gradient is then the divergence's own."""
    reference: Literal["initial"] | Path = "initial"
    """The reference policy: the initial one, or a Hugging Face folder of the same vocabulary."""
    reference_refresh: int = Field(0, ge=0)
    """Replace the reference policy by the current one every so many steps. 0: never."""
    teacher: UrlOrPath | None = None
    """On-policy distillation: a model of the same vocabulary whose logprobs reward each token. A Hugging Face folder,
    which the trainer ranks load; or http://host:port of a vLLM server, which the generator asks (rollout.temperature=1
    only). If that server wants an API key, the environment's VIME_TEACHER_API_KEY has it."""
    teacher_coefficient: float = Field(1.0, gt=0)
    """Weight of the teacher's log-ratio, log p_teacher - log p, in a token's advantage."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """From tokens to one loss: mean over the batch's tokens; over responses of each one's mean; or the sum divided by
    responses x rollout.max_response_tokens (Dr. GRPO)."""
    old_logprobs: Literal["auto", "trainer", "rollout"] = "auto"
    """The policy that ratios are taken from: the trainer's before the step, the engine's, or (auto) for each token the
    trainer's where the current policy sampled it and the engine's where an older one did."""
    minibatches: int = Field(1, ge=1)
    """Divide a step's batch into so many minibatches and update the policy by each in turn, with ratios to the policy
    before the step, which then needs a pass of its own. A step is one batch, whatever the updates in it. A minibatch
    without a token to train on makes no update and is counted as train/skipped_minibatches."""
    importance_sampling: Literal["off", "truncated", "token_mask", "sequence_mask"] = "off"
    """Correct for engines that compute other probabilities than the trainer: weigh a token by p_trainer / p_engine,
    truncated to the bounds; or 0 outside of them, of a token or of a whole response. Where the engine's logprobs are
    the old ones, the ratio contains it already."""
    importance_low: float = Field(0.0, ge=0)
    """Lower bound of that weight."""
    importance_high: float = Field(2.0, gt=0)
    """Upper bound of that weight."""
    routing_replay: bool = False
    """Mixture-of-experts only: train each token through the experts that the engine used for it (R3)."""
    critic: Critic = Critic()

    @property
    def estimator(self) -> str:
        """The advantage estimator in use."""
        return self.advantage or ("gae" if self.name == "ppo" else "grpo")

    @property
    def normalizes(self) -> bool:
        """`normalize_std`, or what the estimator was published with."""
        if self.normalize_std is not None:
            return self.normalize_std
        return self.estimator not in ADVANTAGES or ADVANTAGES[self.estimator].normalize_std

    @property
    def compares_group(self) -> bool:
        """Whether an advantage is relative to the other responses to the prompt."""
        return self.name == "grpo" and self.estimator in ADVANTAGES and ADVANTAGES[self.estimator].compares_group

    @property
    def needs_reference(self) -> bool:
        """Whether a step needs the reference policy's logprobs."""
        return self.name != "sft" and self.kl_coefficient > 0

    @property
    def teacher_url(self) -> str | None:
        """The teacher, if it is a server."""
        return self.teacher if isinstance(self.teacher, str) else None

    @property
    def folders(self) -> dict[str, Path]:
        """Hugging Face folders besides the policy's, by the key that names them."""
        named = {"teacher": self.teacher if isinstance(self.teacher, Path) else None}
        if self.needs_reference and self.reference != "initial":
            named["reference"] = Path(self.reference)
        if self.name == "ppo":
            named["critic.path"] = self.critic.path
        return {f"algorithm.{key}": folder for key, folder in named.items() if folder is not None}

    @property
    def needs_policy_before(self) -> bool:
        """Whether a step needs the policy's own logprobs before the update, in a pass of their own."""
        return self.name != "sft" and (self.kl_of_reward or self.minibatches > 1)

    @property
    def kl_of_reward(self) -> bool:
        """Whether a KL term is taken from the reward."""
        return self.needs_reference and self.kl_in == "reward"

    @model_validator(mode="after")
    def _parts_fit(self) -> Algorithm:
        takes_critic = self.estimator in ADVANTAGES and ADVANTAGES[self.estimator].critic
        if takes_critic != (self.name == "ppo"):
            if takes_critic:
                raise ValueError(f"algorithm.advantage={self.advantage} needs a critic: use algorithm.name=ppo")
            raise ValueError(f"algorithm.advantage={self.advantage} takes no critic: use algorithm.name=grpo")
        if self.importance_low >= self.importance_high:
            raise ValueError(
                f"algorithm.importance_low={self.importance_low:g} must be below"
                f" algorithm.importance_high={self.importance_high:g}"
            )
        if self.clip_dual is not None and (self.loss != "clip" or self.clip_dual <= 1 + self.clip_high):
            raise ValueError(
                f"algorithm.clip_dual={self.clip_dual:g} is for algorithm.loss=clip, and above"
                f" 1 + clip_high = {1 + self.clip_high:g}"
            )
        if self.kl_unbiased and self.kl_in == "reward":
            raise ValueError("algorithm.kl_unbiased is for algorithm.kl_in=loss: a reward has no gradient")
        if self.teacher is not None and self.name == "sft":
            raise ValueError("algorithm.teacher judges what engines sample, and sft has no engines: set it to null")
        if self.reference_refresh and not self.needs_reference:
            raise ValueError("algorithm.reference_refresh needs a reference: algorithm.kl_coefficient above 0")
        if self.importance_sampling != "off" and self.old_logprobs == "rollout":
            raise ValueError(
                "algorithm.old_logprobs=rollout has the engine's probabilities in the ratio already;"
                " set algorithm.importance_sampling=off"
            )
        return self
