"""What a cluster is: its nodes, its scheduler, its containers. One file in clusters/ fills one `Cluster`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from vime.config.section import Section
from vime.config.time_limit import TimeLimit, seconds


def _one_line(value: str) -> str:
    if "\n" in value or "\r" in value:
        raise ValueError("must be one line")
    return value


def _sbatch_option(value: str) -> str:
    if not re.fullmatch(r"--?[A-Za-z][^\r\n]*", value):
        raise ValueError(f"{value!r} is not an sbatch option; write it as --name=value")
    return value


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"{name!r} is not the name of an environment variable")
    return name


Line = Annotated[str, AfterValidator(_one_line)]
SbatchOption = Annotated[str, AfterValidator(_sbatch_option)]
VariableName = Annotated[str, AfterValidator(_variable)]


def _one_address(host: str) -> str:
    if not host or host in ("0", "*") or host.strip("[]:0.") == "":
        raise ValueError("is every interface of this machine, from which others reach the run: give one address")
    if not re.fullmatch(r"[A-Za-z0-9_.:%-]{1,255}", host):
        raise ValueError("is not the name or address of this machine")
    return host


class Node(Section):
    """One node of the cluster; all of them are alike."""

    gpus: int = Field(0, ge=0)
    """GPUs of a node."""
    slots: int | None = Field(None, ge=1)
    """Trainer ranks, or parts of engines, that one node holds. Default: its GPUs. Set it where nodes have no GPU."""
    cpus: int = Field(1, ge=1)
    """CPUs of a node as the scheduler counts them."""
    memory_gb: int | None = Field(None, ge=1)
    """Memory of a node in GB. Shown to people; the scheduler is asked for all of it."""
    gpu: str | None = None
    """Name of the GPU."""
    gpu_memory_gb: float | None = Field(None, gt=0)
    """Memory of a GPU in GB."""
    nvlink_domain: int | None = Field(None, ge=1)
    """GPUs that reach each other over NVLink. Default: those of one node."""
    nvlink_gb_per_s: float | None = Field(None, gt=0)
    """Speed of a GPU inside its NVLink domain, in GB/s."""
    network_gb_per_s: float | None = Field(None, gt=0)
    """Speed of a GPU's share of the network, in GB/s."""

    @property
    def places(self) -> int:
        """Slots of a node: 0 when it has neither GPUs nor `slots`."""
        return self.slots or self.gpus

    @property
    def domain_nodes(self) -> int:
        """Nodes of one NVLink domain."""
        return max(1, self.nvlink_domain // self.gpus) if self.nvlink_domain and self.gpus else 1

    @model_validator(mode="after")
    def _domain_is_whole_nodes(self) -> Node:
        domain = self.nvlink_domain
        if domain is not None and self.gpus and domain > self.gpus and domain % self.gpus:
            raise ValueError(f"node.nvlink_domain={domain} GPUs are not whole nodes of node.gpus={self.gpus}")
        if self.gpus and self.slots is not None and self.slots > self.gpus:
            raise ValueError(f"node.slots={self.slots} are more than node.gpus={self.gpus}")
        return self


class SlurmComponent(Section):
    """What one component (trainer or rollout) asks of the scheduler differently from the other."""

    partition: Line | None = None
    """Partition. Default: cluster.slurm.partition."""
    constraint: Line | None = None
    """Node features. Default: cluster.slurm.constraint."""
    nodelist: Line | None = None
    """Nodes that must be in the allocation, such as node[01-04]."""
    segment: int | None = Field(None, ge=1)
    """Nodes placed together in one NVLink domain. Default: as launch.segment."""
    extra: list[SbatchOption] = []
    """Further sbatch options of this component, such as --network=... ."""
    environment: dict[VariableName, str] = {}
    """Variables of this component's trainers or engines, over cluster.environment, such as NCCL_NVLS_ENABLE."""


class Slurm(Section):
    """How jobs are submitted to SLURM."""

    account: Line | None = None
    """Account to charge."""
    qos: Line | None = None
    """Quality of service."""
    time: TimeLimit = "04:00:00"
    """Time limit of a job, in any of SLURM's forms. A recipe's launch.time wins."""
    partition: Line | None = None
    """Partition of both components."""
    constraint: Line | None = None
    """Node features, as partition."""
    trainer: SlurmComponent = SlurmComponent()
    """What the trainer's nodes ask for differently."""
    rollout: SlurmComponent = SlurmComponent()
    """What the rollout's nodes ask for differently."""
    allocation: SlurmComponent = SlurmComponent()
    """launch.layout=partitioned: what its one allocation asks for. Default: what both components ask for alike."""
    reservation: Line | None = None
    """Reservation to run in."""
    exclude: Line | None = None
    """Nodes never to use."""
    exclusive: bool = True
    """Take whole nodes."""
    mem: Line | None = "0"
    """Memory of a node. "0" is all of it: --exclusive alone does not give memory. null asks for none."""
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """Which option asks for GPUs: --gpus-per-node=N, --gres=gpu:N, or none where nodes come whole."""
    gpu_type: Line | None = None
    """Type of GPU in that option, as the site's gres.conf names it."""
    segment: bool = False
    """Whether --segment exists (SLURM 24.05 with topology/block) and keeps nodes in one NVLink domain."""
    accounting: bool = True
    """Whether sacct answers. Without it states come from the run's own files and squeue."""
    signal_seconds: int = Field(300, ge=30)
    """Seconds before the time limit at which USR2 asks for a checkpoint. SLURM may send it up to 60 s earlier."""
    requeue: bool = True
    """Let a preempted job, or one that reaches its time limit, continue as its next attempt."""
    export: list[VariableName] = ["HOME", "USER", "LOGNAME", "LANG", "VIME_CACHE"]
    """Variables of the submitting shell that the job sees. Others come from the login shell, `setup`, `environment`."""
    extra: list[SbatchOption] = []
    """Further sbatch options of the job, such as --licenses=scratch. One that SLURM forgets at each component of a
    heterogeneous job, such as --hint=nomultithread, is written for each."""
    srun: list[SbatchOption] = []
    """Further options of every srun."""

    def asked(self, key: Literal["partition", "constraint", "nodelist"]) -> tuple[str | None, str | None]:
        """What the trainer's nodes and the rollout's ask for, defaults included."""
        default = getattr(self, key, None)
        return getattr(self.trainer, key) or default, getattr(self.rollout, key) or default

    @property
    def components_differ(self) -> bool:
        """Whether one allocation cannot hold both components."""
        return any(len(set(self.asked(key))) > 1 for key in ("partition", "constraint", "nodelist"))

    @model_validator(mode="after")
    def _time_to_save(self) -> Slurm:
        if seconds(self.time) <= self.signal_seconds:
            raise ValueError(
                f"slurm.time={self.time} is not longer than slurm.signal_seconds={self.signal_seconds}:"
                " USR2 would come before the run starts"
            )
        return self


class Container(Section):
    """The container of trainers and engines. The supervisor runs outside: it needs the scheduler's commands."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """none: modules and a virtual environment. pyxis: srun --container-image. apptainer: apptainer exec."""
    image: Line | None = None
    """Image: a squashfs or sif file, or a registry's name as pyxis writes it."""
    mounts: list[Line] = []
    """HOST or HOST:CONTAINER or HOST:CONTAINER:ro. The run directory is mounted besides."""
    workdir: Path | None = None
    """Folder in the container that roles start in."""
    python: Line = "python"
    """Python inside the container."""
    environment: list[VariableName] = []
    """Variables to pass into the container by name, besides the run's own and cluster.environment's."""
    extra: list[SbatchOption] = []
    """Further options: pyxis' srun options, or those of apptainer exec."""

    @model_validator(mode="after")
    def _image_is_named(self) -> Container:
        if (self.kind == "none") != (self.image is None):
            raise ValueError(
                f"container.kind={self.kind} "
                + ("uses no image; set container.image=null" if self.kind == "none" else "needs container.image")
            )
        return self


class Preflight(Section):
    """SLURM only: what is checked on every node before the roles start there."""

    checks: list[Literal["gpus", "nvlink", "files", "ports", "versions", "clock"]] = [
        "gpus",
        "nvlink",
        "files",
        "ports",
        "versions",
        "clock",
    ]
    """gpus: present and free of other processes. nvlink: NVLink and IMEX are up. files: the run directory shows both
    ways. ports: can be bound. versions: packages are equal everywhere. clock: is equal everywhere. []: no check."""
    timeout: float = Field(180.0, gt=0)
    """Seconds that the checks may take on all nodes, outside of a container."""
    container_timeout: float = Field(900.0, gt=0)
    """Seconds that those in the container may take after that: an image of 30 GB may have to be unpacked first."""
    clock_skew: float = Field(10.0, gt=0)
    """Seconds that a node's clock may differ from the supervisor's."""


class Cluster(Section):
    """What a cluster is. `local` runs every role as a process of this machine."""

    name: str
    """Name shown in plans and reports."""
    kind: str | None = None
    """Which entry of a recipe's `on:` applies. Default: the name. A copy of gb200.yaml keeps `kind: gb200`."""
    scheduler: Literal["local", "slurm"] = "local"
    """Who starts the job: this machine's process table, or SLURM."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the trainer ranks and the engines compute on."""
    host: Annotated[str, AfterValidator(_one_address)] = "127.0.0.1"
    """Local only: the address that every server of the run binds to."""
    interface: str = "lo"
    """Network interface of gloo and NCCL traffic, and of every server on SLURM."""
    node: Node = Node()
    """SLURM only: the hardware of a node."""
    slurm: Slurm = Slurm()
    """SLURM only: how jobs are submitted."""
    container: Container = Container()
    """SLURM only: the container of trainers and engines."""
    preflight: Preflight = Preflight()
    """SLURM only: checks of every node before the roles start."""
    setup: list[Line] = []
    """SLURM only: shell lines that the job starts with, such as `module load cuda` or activating an environment."""
    python: Line | None = None
    """SLURM only: Python of the batch step, found after `setup`. Default: the one that submits."""
    environment: dict[VariableName, str] = {}
    """Variables set for every role; slurm.trainer.environment and slurm.rollout.environment are of one kind alone."""
    startup_timeout: float = Field(600.0, gt=0)
    """Seconds a role may take to become ready."""
    save_timeout: float = Field(240.0, gt=0)
    """Seconds that the trainers get, after USR2, to finish their step and save. On SLURM less than signal_seconds."""
    stop_timeout: float = Field(5.0, gt=0)
    """Seconds the roles get to stop by themselves before they are killed."""

    @model_validator(mode="after")
    def _slurm_has_nodes(self) -> Cluster:
        if self.scheduler == "slurm" and not self.node.places:
            raise ValueError("cluster.scheduler=slurm needs cluster.node.gpus, or cluster.node.slots on CPUs")
        if self.scheduler == "slurm" and self.device == "cuda" and not self.node.gpus:
            raise ValueError("cluster.device=cuda needs cluster.node.gpus")
        return self
