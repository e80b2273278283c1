"""Which command starts which role: the one table between a plan and processes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vime.config import Config
from vime.plan.plan import Component, Plan, RoleName, RolePlan
from vime.slurm.allocation import Allocation
from vime.slurm.srun import THREADS, container_prefix, gpu_option, python_of, step_options

FINISHES: frozenset[RoleName] = frozenset({"trainer", "generator"})
"""Roles that end by themselves. The others are servers."""


@dataclass(frozen=True)
class Command:
    """One process to start: a role's process on this machine, or the srun of all of them."""

    role: str
    rank: int | None
    """None: an srun whose ranks learn their number on their node."""
    world_size: int
    argv: tuple[str, ...]
    finishes: bool
    """True: the run is completed when all of these have exited 0. False: a server, ended when they have."""
    host: str = "127.0.0.1"
    """Address that the process binds and publishes."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of this process besides the run's own."""

    @property
    def name(self) -> str:
        """Role and rank as a person reads them: trainer-0. Of an srun the role alone."""
        return self.role if self.rank is None else f"{self.role}-{self.rank}"


def role_commands(config: Config, plan: Plan) -> list[Command]:
    """The processes of one run on this machine, in the plan's order."""
    commands = []
    for role in plan.roles:
        if role.name == "supervisor":
            continue
        threads = thread_counts(_computing(config, role.name))
        for process in role.processes:
            environment = threads | _device_environment(config, role.name)
            if process.devices:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in process.devices)
            commands.append(
                Command(
                    role=role.name,
                    rank=process.rank,
                    world_size=len(role.processes),
                    argv=(sys.executable, "-m", role.module),
                    finishes=role.name in FINISHES,
                    host=config.cluster.host,
                    environment=environment,
                )
            )
    return commands


def thread_counts(processes: int | None) -> dict[str, str]:
    """Variables that give each of `processes` computing at once its share of this machine's cores; None: one core."""
    cores = len(os.sched_getaffinity(0))
    threads = 1 if processes is None else max(1, cores // processes)
    return {name: str(threads) for name in THREADS}


def _computing(config: Config, role: RoleName) -> int | None:
    trainers, engines = config.training.ranks, config.rollout.engines * config.rollout.tensor_parallel
    if role not in ("trainer", "engine"):
        return None
    if config.buffer.max_staleness:
        return trainers + engines
    # Strictly on-policy, trainers and engines take turns.
    return trainers if role == "trainer" else engines


COMPUTING = ("trainer", "engine")
"""Roles that get their component's CPUs and GPUs. The others share a node with them: all its CPUs, none of its GPUs."""
GPU_TRAINER = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Megatron-core overlaps tensor-parallel communication with one queue only; packs of many sizes fragment memory."""
MAX_THREADS = 16
"""Threads of a trainer rank: more gain nothing and, on nodes with 144 cores, only wait for each other."""


def step_commands(
    config: Config, plan: Plan, allocation: Allocation, programs: Mapping[str, Sequence[str]] | None = None
) -> list[Command]:
    """One step a role, in the plan's order. `programs` replaces the command of a role."""
    commands = []
    for role in plan.roles:
        if role.name == "supervisor":
            continue
        component = next(one for one in plan.components if one.name == role.component)
        python = python_of(config.cluster)
        program = (programs or {}).get(role.name) or (python, "-m", role.module)
        commands.append(
            Command(
                role=role.name,
                rank=None,
                world_size=len(role.processes),
                argv=(
                    *srun(config, plan, component, allocation, role),
                    *container_prefix(config),
                    *(python, "-m", "vime.supervise.step_rank"),
                    *program,
                ),
                finishes=role.name in FINISHES,
                environment=_step_threads(role.name, component.cpus_per_task) | _device_environment(config, role.name),
            )
        )
    return commands


def step_lines(config: Config, plan: Plan) -> list[str]:
    """The srun of each role as the supervisor will start it, with the plan's names where hosts will be."""
    hosts: dict[str, tuple[str, ...]] = {component.name: component.nodes for component in plan.components}
    return [shlex.join(command.argv) for command in step_commands(config, plan, Allocation("<job>", hosts))]


def _device_environment(config: Config, role: RoleName) -> dict[str, str]:
    """What a role's libraries need on GPUs, unless the site says otherwise."""
    return GPU_TRAINER if config.cluster.device == "cuda" and role == "trainer" else {}


def _step_threads(role: RoleName, cpus: int) -> dict[str, str]:
    """Threads of a rank. An engine's are not set: then vLLM divides the cores among its workers by itself."""
    if role == "engine":
        return {}
    return {name: str(min(cpus, MAX_THREADS) if role == "trainer" else 1) for name in THREADS}


def srun(config: Config, plan: Plan, component: Component, allocation: Allocation, role: RolePlan) -> list[str]:
    """The srun of one role, without the program. Its ranks are placed as the plan says."""
    used = list(dict.fromkeys(process.node for process in role.processes))
    hosts = [allocation.hosts[component.name][component.nodes.index(node)] for node in used]
    computing = role.name in COMPUTING
    each = max(sum(process.node == node for process in role.processes) for node in used)
    cpus = component.cpus_per_task if computing else None
    gpus = gpu_option(config.cluster, component.gpus_per_node if computing else 0)
    return [*step_options(config, plan, component, hosts, len(role.processes), each, cpus, role.name), *gpus]
