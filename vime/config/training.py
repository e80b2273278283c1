"""The trainer ranks: what a recipe may say under `training`, `weights` and `demonstrations`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vime.config.algorithm import Algorithm as Algorithm
from vime.config.cluster import Cluster as Cluster
from vime.config.data import Data as Data
from vime.config.rollout import Buffer as Buffer
from vime.config.rollout import Dtype
from vime.config.rollout import Evaluation as Evaluation
from vime.config.rollout import Rollout as Rollout
from vime.config.section import Section


class Demonstrations(Section):
    """sft only: the texts to imitate, made from the prompt source's own answers."""

    decline_share: float = Field(0.0, ge=0, lt=1)
    """Share of the demonstrations that decline to answer, so that a policy is left for RL to improve."""
    decline_text: str = Field("?", min_length=1)
    """What such a demonstration says instead of the answer."""
    seed: int = 0
    """Seed of which demonstrations decline."""


class Training(Section):
    """The trainer ranks."""

    ranks: int = Field(2, ge=1)
    """Megatron ranks: one a GPU, or one process each on a CPU."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share each layer."""
    pipeline_parallel: int = Field(1, ge=1)
    """Stages that the layers are divided over."""
    context_parallel: int = Field(1, ge=1)
    """Ranks that share each sequence."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that the experts of a mixture-of-experts layer are divided over."""
    expert_tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one expert. 1: each expert is whole on its rank."""
    expert_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """How tokens reach their experts: by collectives, or by DeepEP's kernels where they are installed (GPUs only)."""
    virtual_stages: int = Field(1, ge=1)
    """Pieces of the model on each pipeline stage: more of them shorten the pipeline's idle ends."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, those of the core attention, or those of whole layers."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions along the sequence."""
    steps: int = Field(100, ge=1)
    """Optimizer steps of the run."""
    dtype: Dtype = "bfloat16"
    """Number format of weights and activations; master weights and gradients are float32."""
    max_tokens_per_microbatch: int = Field(16384, ge=16)
    """Most tokens packed into one forward pass of one rank."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose logits exist at once when logprobs are computed."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear learning-rate warm-up: step w of w has `learning_rate`, step 1 a w-th of it."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Learning rate that a cosine or linear `schedule` has come down to after the last step."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first-moment decay."""
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Adam's second-moment decay."""
    adam_eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""
    save_interval: int = Field(0, ge=0)
    """Save a checkpoint every so many steps, and at the end. 0 saves none."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest complete checkpoints kept."""
    export: bool = True
    """Write the final policy as a Hugging Face folder."""
    timeout: float = Field(600.0, gt=0)
    """Seconds a collective may wait for another rank."""

    @property
    def replica(self) -> int:
        """Ranks of one model replica: tensor_parallel * pipeline_parallel * context_parallel."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def data_parallel(self) -> int:
        """Model replicas: ranks / replica."""
        return self.ranks // self.replica

    @model_validator(mode="after")
    def _sizes_divide(self) -> Training:
        names = ["tensor_parallel", "pipeline_parallel", *(["context_parallel"] if self.context_parallel > 1 else [])]
        if self.ranks % self.replica:
            raise ValueError(
                f"training.ranks={self.ranks} is not a multiple of {' x '.join(names)} ="
                f" {' x '.join(str(getattr(self, name)) for name in names)} = {self.replica}"
            )
        stage = self.ranks // self.pipeline_parallel
        experts, named = self.expert_parallel * self.expert_tensor_parallel, f"expert_parallel={self.expert_parallel}"
        if self.expert_tensor_parallel > 1:
            named += f" x expert_tensor_parallel={self.expert_tensor_parallel}"
        if stage % experts:
            raise ValueError(
                f"training.{named} does not divide the {stage} ranks of a pipeline stage"
                f" (training.ranks={self.ranks} / training.pipeline_parallel={self.pipeline_parallel})"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("training.sequence_parallel needs training.tensor_parallel above 1")
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            raise ValueError("training.virtual_stages needs training.pipeline_parallel above 1")
        return self


class Weights(Section):
    """How new weights reach the engines, and the proof that they arrived."""

    backend: Literal["gloo", "nccl"] | None = None
    """vLLM weight-transfer backend. null: nccl on GPUs, gloo on CPUs."""
    verify: bool = True
    """Compare each engine's logprobs of a probe sequence with the trainer's after every update."""
    tolerance: float = Field(1e-4, gt=0)
    """Largest mean |difference| of those logprobs. About 1e-4 in float32, 0.05 when a side computes in bfloat16."""
    timeout: float = Field(300.0, gt=0)
    """Seconds one update of all engines may take."""
