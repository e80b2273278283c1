"""What a mini cluster looks like, and the configuration files that say so to Slurm."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of one partition: <partition>0, <partition>1, ..."""

    partition: str
    count: int
    cpus: int = 8
    gpus: int = 0
    memory_mb: int = 32_000
    features: str = ""
    block: str = ""
    """Name of the NVLink domain (topology/block of Slurm 24.11) that they are in."""
    prefix: str = ""
    """Start of the nodes' names, when it is not the partition's."""

    @property
    def names(self) -> list[str]:
        """Every node's name."""
        return [f"{self.prefix or self.partition}{index}" for index in range(self.count)]


@dataclass(frozen=True)
class Shape:
    """A cluster: its nodes, and further lines of slurm.conf."""

    nodes: tuple[Nodes, ...]
    extra: tuple[str, ...] = ()
    block_size: int = 0
    """Nodes of one block; 0: a flat network."""

    @property
    def names(self) -> list[str]:
        """Every node's name."""
        return [name for group in self.nodes for name in group.names]


SMALL = Shape((Nodes("train", 2), Nodes("rollout", 1)))
"""What clusters/minislurm.yaml describes."""


@dataclass(frozen=True)
class Ports:
    """The ports of a cluster's daemons, all on the loopback interface."""

    controller: int
    nodes: tuple[int, ...]

    @classmethod
    def free(cls, nodes: int) -> Ports:
        """Ports that nothing uses now. Slurm wants to be told numbers, so they cannot be bound first."""
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(nodes + 1)]
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        return cls(ports[0], tuple(ports[1:]))


def write_configuration(shape: Shape, folder: Path, seen: Path, ports: Ports) -> None:
    """Write slurm.conf and its companions into `folder`, which the daemons see as `seen`."""
    (folder / "slurm.conf").write_text("\n".join(_slurm_conf(shape, seen, ports)) + "\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if _new(shape) else "")
    gpus = [f"NodeName={','.join(group.names)} {_gres(group, seen)}" for group in shape.nodes if group.gpus]
    (folder / "gres.conf").write_text("\n".join(gpus) + "\n")
    for index in range(max((group.gpus for group in shape.nodes), default=0)):
        (folder / f"gpu{index}").touch()  # an ordinary file instead of a device: accepted, with an error in the log
    if shape.block_size:
        blocks: dict[str, list[str]] = {}
        for group in shape.nodes:
            blocks.setdefault(group.block, []).extend(group.names)
        lines = [f"BlockName={name} Nodes={','.join(names)}" for name, names in blocks.items()]
        (folder / "topology.conf").write_text("\n".join([*lines, f"BlockSizes={shape.block_size}"]) + "\n")


def _slurm_conf(shape: Shape, seen: Path, ports: Ports) -> Sequence[str]:
    user = getpass.getuser()
    host = socket.gethostname()
    lines = [
        "ClusterName=mini",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports.controller}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        # A requeued job waits until its old credential has expired, 120 s by default.
        f"AuthInfo=socket={seen}/munge.socket,cred_expire=5",
        f"StateSaveLocation={seen}/state",
        f"SlurmdSpoolDir={seen}/spool/%n",
        f"SlurmctldPidFile={seen}/slurmctld.pid",
        f"SlurmdPidFile={seen}/slurmd-%n.pid",
        f"SlurmctldLogFile={seen}/slurmctld.log",
        f"SlurmdLogFile={seen}/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        # Real CPUs and memory are fewer than those configured.
        "SlurmdParameters=config_overrides",
        "SchedulerType=sched/backfill",
        # Heterogeneous jobs wait for the backfill pass.
        "SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0",
        "ReturnToService=2",
        "KillWait=10",
        "SlurmdTimeout=15",
        "SlurmctldTimeout=10",
        "MinJobAge=300",
        "JobRequeue=1",
        "GresTypes=gpu",
        *shape.extra,
    ]
    if _new(shape):
        lines.remove("SwitchType=switch/none")
        lines.append("TopologyPlugin=topology/block")
    numbers = iter(ports.nodes)
    for group in shape.nodes:
        for name in group.names:
            features = f" Feature={group.features}" if group.features else ""
            gres = f" Gres=gpu:{group.gpus}" if group.gpus else ""
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={next(numbers)} CPUs={group.cpus}"
                f" RealMemory={group.memory_mb}{gres}{features} State=UNKNOWN"
            )
    partitions: dict[str, list[str]] = {}
    for group in shape.nodes:
        partitions.setdefault(group.partition, []).extend(group.names)
    for index, (name, nodes) in enumerate(partitions.items()):
        default = "YES" if index == 0 else "NO"
        lines.append(f"PartitionName={name} Nodes={','.join(nodes)} Default={default} MaxTime=INFINITE State=UP")
    if len(partitions) > 1 and "all" not in partitions:
        # One allocation that is sliced by node needs a partition that holds every node.
        lines.append(f"PartitionName=all Nodes={','.join(shape.names)} Default=NO MaxTime=INFINITE State=UP")
    return lines


def _new(shape: Shape) -> bool:
    return shape.block_size > 0


def _gres(group: Nodes, seen: Path) -> str:
    last = f"[0-{group.gpus - 1}]" if group.gpus > 1 else "0"
    return f"Name=gpu File={seen}/gpu{last}"
