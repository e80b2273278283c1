"""The typed configuration of one run: what a recipe and a cluster file may say.

Every field is documented by the string under it; `python launch.py --help recipe.rollout` prints those strings. The
models check themselves when they are made, so that a configuration that exists is one that can be planned. Reading
files, overrides and error lines are `vime.config.compose`'s work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from vime.config.algorithm import Algorithm as Algorithm
from vime.config.cluster import Cluster as Cluster
from vime.config.data import Data as Data
from vime.config.model import Model
from vime.config.rollout import Buffer as Buffer
from vime.config.rollout import Evaluation as Evaluation
from vime.config.rollout import Rollout as Rollout
from vime.config.section import Section
from vime.config.time_limit import TimeLimit, seconds
from vime.config.training import Demonstrations, Training, Weights


class Launch(Section):
    """How a job on SLURM is laid out. A local cluster ignores it."""

    layout: Literal["auto", "hetjob", "partitioned"] = "auto"
    """partitioned: one allocation, sliced. hetjob: a heterogeneous job, trainer component 0 and rollout component 1.
    auto: partitioned, unless the components ask for different partitions, constraints or nodes."""
    trainer_nodes: int | None = Field(None, ge=1)
    """Nodes of the trainer. Default: as few as hold training.ranks."""
    rollout_nodes: int | None = Field(None, ge=1)
    """Nodes of the engines. Default: as few as hold rollout.engines."""
    segment: int | None = Field(None, ge=1)
    """Nodes of one --segment, where the cluster has it. Default: few that divide the nodes and part no group."""
    time: TimeLimit | None = None
    """Time limit of this job. Default: cluster.slurm.time."""


class Run(Section):
    """Where a run lives and what it is called."""

    root: Path = Path("runs")
    """Folder of run directories, on the shared filesystem."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=200)
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
    def nodes_per_engine(self) -> int:
        """Nodes of one engine: more than 1 where it is wider than a node, which it then takes whole."""
        slots = self.cluster.node.places
        width = self.rollout.tensor_parallel
        return width // slots if self.cluster.scheduler == "slurm" and width > slots else 1

    @property
    def weights_backend(self) -> Literal["gloo", "nccl"]:
        """The weight-transfer backend: `weights.backend`, or the device's own."""
        return self.weights.backend or ("nccl" if self.cluster.device == "cuda" else "gloo")

    @property
    def _mixes_ratios(self) -> bool:
        """Whether a response's one ratio may be over tokens of which some are corrected for the engine already.

        GSPO's gradient is the response's where all its tokens have one weight. A stale token's ratio is to the engine
        and needs no correction, a fresh one's is to the trainer and gets one: in one response the weights would differ.
        """
        return (
            self.algorithm.loss == "gspo"
            and self.algorithm.old_logprobs == "auto"
            and self.buffer.max_staleness > 0
            and not self.rollout.mask_off_policy
        )

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
        if self._mixes_ratios and self.algorithm.importance_sampling != "off":
            raise ValueError(
                f"algorithm.loss=gspo has one ratio a response, and with algorithm.old_logprobs=auto and"
                f" buffer.max_staleness={self.buffer.max_staleness} algorithm.importance_sampling would correct some of"
                " its tokens only; set algorithm.old_logprobs=trainer, or rollout.mask_off_policy=true"
            )
        if self.weights.backend == "nccl" and self.cluster.device == "cpu":
            raise ValueError("weights.backend=nccl needs cluster.device=cuda; on a CPU use gloo")
        return self
