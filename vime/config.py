"""The typed configuration of one run: what a recipe and a cluster file may say.

Every field is documented by the string under it; `python launch.py --help recipe.rollout` prints those strings. The
models check themselves when they are made, so that a configuration that exists is one that can be planned. Reading
files, overrides and error lines are `vime.compose`'s work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from vime.algorithm import Algorithm as Algorithm
from vime.cluster import Cluster as Cluster
from vime.data_config import Data as Data
from vime.rollout_config import Buffer as Buffer
from vime.rollout_config import Dtype
from vime.rollout_config import Evaluation as Evaluation
from vime.rollout_config import Rollout as Rollout
from vime.section import Section
from vime.time_limit import TimeLimit, seconds


class TinyModel(Section):
    """A model that vime makes for tests and first runs, instead of one that was downloaded."""

    family: Literal["qwen3", "qwen3_moe", "glm4_moe"] = "qwen3"
    """Model family; also the `model_type` of its Hugging Face configuration."""
    layers: int = Field(4, ge=1)
    """Transformer layers."""
    hidden: int = Field(128, ge=8)
    """Width of the residual stream."""
    heads: int = Field(4, ge=1)
    """Query heads."""
    kv_heads: int = Field(2, ge=1)
    """Key-value heads (query groups)."""
    head_dim: int = Field(32, ge=4)
    """Width of one head."""
    ffn: int = Field(384, ge=8)
    """Width of the gated feed-forward layer."""
    experts: int = Field(0, ge=0)
    """Experts of a mixture-of-experts layer; 0 in a dense family."""
    top_k: int = Field(2, ge=1)
    """Experts that a token uses."""
    expert_ffn: int = Field(128, ge=8)
    """Width of one expert."""
    shared_experts: int = Field(1, ge=0)
    """glm4_moe: experts, of the same width, that every token uses."""
    dense_layers: int = Field(1, ge=0)
    """glm4_moe: first layers that have no experts."""
    qk_norm: bool = False
    """glm4_moe: whether queries and keys are normalised, which the other families always do."""
    routing_bias: float = Field(0.0, ge=0)
    """glm4_moe: standard deviation of the router's selection bias."""
    context: int = Field(512, ge=16)
    """Longest sequence, in tokens."""
    tied_embeddings: bool = True
    """Whether the output layer shares the embedding's weight."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights."""
    seed: int = 0
    """Seed of the initial weights."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> TinyModel:
        if self.heads % self.kv_heads:
            raise ValueError(f"model.tiny.heads={self.heads} is not a multiple of model.tiny.kv_heads={self.kv_heads}")
        if (self.experts > 0) != (self.family != "qwen3"):
            raise ValueError(
                f"model.tiny.experts={self.experts} with model.tiny.family={self.family}: qwen3 has none, the others"
                " some"
            )
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"model.tiny.top_k={self.top_k} exceeds model.tiny.experts={self.experts}")
        if self.family == "glm4_moe" and self.dense_layers >= self.layers:
            raise ValueError(
                f"model.tiny.dense_layers={self.dense_layers} leaves none of model.tiny.layers={self.layers} with"
                " experts"
            )
        return self


class Shape(Section):
    """The sizes of a published model, so that a run can be planned where its files are not."""

    layers: int = Field(ge=1)
    """Transformer layers."""
    hidden: int = Field(ge=1)
    """Width of the residual stream."""
    heads: int = Field(ge=1)
    """Query heads."""
    kv_heads: int = Field(ge=1)
    """Key-value heads (query groups)."""
    head_dim: int = Field(ge=1)
    """Width of one head."""
    ffn: int = Field(ge=1)
    """Width of a dense feed-forward layer."""
    vocabulary: int = Field(ge=1)
    """Rows of the embedding."""
    context: int = Field(ge=1)
    """Longest sequence, in tokens."""
    tied_embeddings: bool = False
    """Whether the output layer shares the embedding's weight."""
    qk_norm: bool = False
    """Whether queries and keys are normalised."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have a bias."""
    experts: int = Field(0, ge=0)
    """Experts of a mixture-of-experts layer. 0: dense."""
    top_k: int = Field(0, ge=0)
    """Experts that a token uses."""
    expert_ffn: int = Field(0, ge=0)
    """Width of one expert."""
    shared_expert_ffn: int = Field(0, ge=0)
    """Width of the expert that every token uses."""
    dense_layers: int = Field(0, ge=0)
    """First layers of a mixture-of-experts model that are dense."""


class Model(Section):
    """Where the initial policy comes from: a Hugging Face folder, or a tiny model made here."""

    path: Path | None = None
    """A Hugging Face folder of a supported family (config, tokenizer, safetensors)."""
    name: str | None = None
    """The model's name on the Hugging Face hub: which folder `path` should be."""
    shape: Shape | None = None
    """The named model's sizes. With them a run is planned and shown without `path`; submitting it needs `path`."""
    tiny: TinyModel | None = None
    """The tiny model to make when there is no `path`."""
    warmup: str | None = None
    """Name or path of an `sft` recipe that trains the tiny model first. Its result is cached under VIME_CACHE."""

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        origin = self.path is not None or self.shape is not None
        if origin == (self.tiny is not None):
            other = "model.shape" if self.path is None and self.shape is not None else "model.path"
            raise ValueError(f"give exactly one of {other} and model.tiny; set the other to null")
        if self.warmup is not None and self.tiny is None:
            raise ValueError("model.warmup trains a tiny model; with model.path set it to null")
        return self


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
    """Steps of linear learning-rate warm-up."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Learning rate at the end when `schedule` is cosine or linear."""
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

    backend: Literal["gloo", "nccl"] = "gloo"
    """vLLM weight-transfer backend: nccl on GPUs, gloo on CPUs."""
    verify: bool = True
    """Compare each engine's logprobs of a probe sequence with the trainer's after every update."""
    tolerance: float = Field(1e-4, gt=0)
    """Largest mean |difference| of those logprobs. About 1e-4 in float32, 0.05 when a side computes in bfloat16."""
    timeout: float = Field(300.0, gt=0)
    """Seconds one update of all engines may take."""


class Launch(Section):
    """How a job on SLURM is laid out. A local cluster ignores it."""

    layout: Literal["hetjob", "partitioned"] = "hetjob"
    """hetjob: a heterogeneous job, trainer component 0 and rollout component 1. partitioned: one allocation, sliced."""
    trainer_nodes: int | None = Field(None, ge=1)
    """Nodes of the trainer. Default: as few as hold training.ranks."""
    rollout_nodes: int | None = Field(None, ge=1)
    """Nodes of the engines. Default: as few as hold rollout.engines."""
    time: TimeLimit | None = None
    """Time limit of this job. Default: cluster.slurm.time."""


class Run(Section):
    """Where a run lives and what it is called."""

    root: Path = Path("runs")
    """Folder of run directories, on the shared filesystem."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the run directory. Default: recipe, time and a random suffix."""
    seed: int = Field(1234, ge=0, lt=1 << 63)
    """Seed of prompt order, sampling and training."""


class Config(Section):
    """One run, whole."""

    recipe: str
    """Name of the recipe."""
    cluster: Cluster
    model: Model
    data: Data = Data()
    demonstrations: Demonstrations = Demonstrations()
    algorithm: Algorithm = Algorithm()
    rollout: Rollout = Rollout()
    buffer: Buffer = Buffer()
    training: Training = Training()
    weights: Weights = Weights()
    evaluation: Evaluation = Evaluation()
    launch: Launch = Launch()
    run: Run = Run()

    @property
    def time_limit(self) -> int:
        """SLURM only: seconds that the job may take."""
        return seconds(self.launch.time or self.cluster.slurm.time)

    @property
    def engine_parts(self) -> int:
        """Nodes of one engine: more than 1 where it is wider than a node, which it then takes whole."""
        slots = self.cluster.node.places
        width = self.rollout.tensor_parallel
        return width // slots if self.cluster.scheduler == "slurm" and width > slots else 1

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        if self.algorithm.routing_replay and self.algorithm.name == "sft":
            raise ValueError("algorithm.routing_replay replays what engines chose, and sft has none: set it to false")
        if (self.rollout.engines == 0) != (self.algorithm.name == "sft"):
            raise ValueError("rollout.engines is 0 with algorithm.name=sft, and only then")
        unscored = [name for name, one in self.evaluation.datasets.items() if one.reward is None]
        if unscored and self.data.reward == "task":
            raise ValueError(
                f"evaluation.datasets.{unscored[0]} needs a reward of its own:"
                " data.reward=task scores its own task's answers"
            )
        if self.rollout.top_p < 1 and self.algorithm.name != "sft":
            raise ValueError(
                f"rollout.top_p={self.rollout.top_p} biases the policy gradient: only 1 is supported for training"
            )
        if self.algorithm.teacher_url is not None and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature={self.rollout.temperature:g} with algorithm.teacher={self.algorithm.teacher_url}:"
                " a server's logprobs of given tokens are those of temperature 1; set rollout.temperature=1, or give"
                " the teacher's Hugging Face folder"
            )
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if samples < self.training.data_parallel:
            raise ValueError(
                f"a step has {self.rollout.prompts_per_step} x {self.rollout.samples_per_prompt} = {samples} samples,"
                f" fewer than the {self.training.data_parallel} data-parallel ranks of"
                f" training.ranks={self.training.ranks}"
            )
        if self.algorithm.compares_group and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"{self.algorithm.estimator} compares responses of one prompt: rollout.samples_per_prompt must be at"
                " least 2"
            )
        if self.weights.backend == "nccl" and self.cluster.device == "cpu":
            raise ValueError("weights.backend=nccl needs cluster.device=cuda; on a CPU use gloo")
        return self
