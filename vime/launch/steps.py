"""The srun command of each role on SLURM: one step a role, with a wrapper (`vime.launch.step_rank`) a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vime.config import Config
from vime.launch.commands import FINISHES, Command
from vime.plan.plan import Component, Plan, RolePlan
from vime.slurm.allocation import Allocation
from vime.slurm.srun import THREADS, container_prefix, gpu_option, python_of, step_options

COMPUTING = ("trainer", "engine")
"""Roles that get their component's CPUs and GPUs. The others share a node with them."""


def step_commands(
    config: Config, plan: Plan, allocation: Allocation, programs: Mapping[str, Sequence[str]] | None = None
) -> list[Command]:
    """One step a role, in the plan's order. `programs` replaces the command of a role."""
    commands = []
    for role in plan.roles:
        if role.name == "supervisor":
            continue
        component = next(part for part in plan.components if part.name == role.component)
        python = python_of(config.cluster)
        program = (programs or {}).get(role.name) or (python, "-m", role.module)
        cpus = component.cpus_per_task if role.name in COMPUTING else 1
        environment = {name: str(cpus) for name in THREADS}
        if role.name not in COMPUTING:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        commands.append(
            Command(
                role=role.name,
                rank=None,
                world_size=len(role.processes),
                argv=(
                    *srun(config, plan, component, allocation, role),
                    *container_prefix(config),
                    *(python, "-m", "vime.launch.step_rank"),
                    *program,
                ),
                finishes=role.name in FINISHES,
                environment=environment,
            )
        )
    return commands


def srun(config: Config, plan: Plan, component: Component, allocation: Allocation, role: RolePlan) -> list[str]:
    """The srun of one role, without the program. Its ranks are placed as the plan says."""
    used = list(dict.fromkeys(process.node for process in role.processes))
    hosts = [allocation.hosts[component.name][component.nodes.index(node)] for node in used]
    computing = role.name in COMPUTING
    each = max(sum(process.node == node for process in role.processes) for node in used)
    cpus = component.cpus_per_task if computing else 1
    gpus = gpu_option(config.cluster, component.gpus_per_node) if computing else []
    return [*step_options(config, plan, component, hosts, len(role.processes), each, cpus, role.name), *gpus]












