"""The text that is submitted to SLURM, exactly: options of the job, options of each component, and the body.

SLURM resets some options at each `#SBATCH hetjob` and carries others over: the first kind is written for every
component, the second once at the top.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from vime.config import Config
from vime.config.algorithm import TEACHER_KEY
from vime.config.cluster import Cluster, SlurmComponent
from vime.config.compose import ROOT
from vime.config.time_limit import text as time_text
from vime.errors import UserError
from vime.plan.plan import Component, Plan
from vime.slurm.srun import gpu_request

Layout = Literal["hetjob", "partitioned", "single"]
RESET = frozenset(
    "constraint contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu distribution extra-node-info gpu-bind"
    " gpu-freq gres gres-flags hint mem-bind mem-per-cpu mem-per-gpu mincpus network ntasks-per-core ntasks-per-"
    " socket overcommit oversubscribe prefer resv-ports sockets-per-node spread-job switches thread-spec threads-"
    " per-core tmp tres-bind umask use-min-nodes consolidate-segments spread-segments".split()
)
"""Options that sbatch forgets at `#SBATCH hetjob` (`reset_each_pass` in Slurm's slurm_opt.c) and every component needs.
Those that a job needs once, such as --licenses and --mail-type, stay with its first component."""
RESET_LETTERS = frozenset("CSmBOs")
BATCH_LOG = "%j_0_log.out"
"""Output of the batch step in the run's submitit folder, by the name that submitit looks for."""


def batch_command(config: Config, run_dir: Path) -> tuple[str, ...]:
    """What the batch step runs: submitit's loader, with the folder that the pickled job lies in."""
    return (config.cluster.python or sys.executable, "-u", "-m", "submitit.core._submit", str(run_dir / "submitit"))


def sbatch_text(
    config: Config, plan: Plan, *, run_dir: Path, command: Sequence[str], dependency: str | None = None
) -> str:
    """The sbatch script of one run: `command` runs in the batch step, on the first node of the trainer component.

    dependency: the value of --dependency, such as afterany:123. Raises UserError for components that one allocation
    cannot hold.
    """
    sections = ["\n".join(_option(*item) for item in _job_options(config, plan, run_dir, dependency))]
    if plan.layout == "hetjob":
        sections += ["\n#SBATCH hetjob\n".join(_lines(config, component, "hetjob") for component in plan.components)]
    elif len(plan.components) == 1:
        sections += [_lines(config, plan.components[0], "single")]
    else:
        sections += [_lines(config, _whole(config, plan), "partitioned")]
    return "\n".join(["#!/bin/bash -l", *sections, "", *_body(config.cluster, command), ""])


def _job_options(config: Config, plan: Plan, run_dir: Path, dependency: str | None) -> Iterator[tuple[str, str | None]]:
    slurm = config.cluster.slurm
    assert plan.time_limit is not None, "a plan for SLURM has a time limit"
    yield "job-name", run_dir.name
    yield "comment", str(run_dir)
    for name, value in (
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("reservation", slurm.reservation),
        ("exclude", slurm.exclude),
        ("dependency", dependency),
    ):
        if value is not None:
            yield name, value
    yield "time", time_text(plan.time_limit)
    # B: to the batch shell only, which is the supervisor's ancestor: roles never see it.
    yield "signal", f"B:USR2@{slurm.signal_seconds}"
    yield ("requeue" if slurm.requeue else "no-requeue"), None
    if slurm.mem is not None:
        yield "mem", slurm.mem
    yield "chdir", str(ROOT)
    yield "output", str(run_dir / "submitit").replace("%", "%%") + "/" + BATCH_LOG
    # A requeued job goes on writing where its first attempt stopped.
    yield "open-mode", "append"
    # Nothing else of the submitting shell: a job must not depend on where it was submitted from.
    key = [TEACHER_KEY] if config.algorithm.teacher_url is not None else []
    yield "export", ",".join(dict.fromkeys([*slurm.export, *key])) or "NIL"
    for option in slurm.extra:
        if plan.layout != "hetjob" or not _is_reset(option):
            yield option, None


def _lines(config: Config, component: Component, layout: Layout) -> str:
    title = "# all nodes" if layout == "partitioned" else f"# {component.name} component"
    return "\n".join([title, *(_option(*item) for item in _component_options(config, component, layout))])


def _component_options(config: Config, component: Component, layout: Layout) -> Iterator[tuple[str, str | None]]:
    slurm = config.cluster.slurm
    own = _shared(config) if layout == "partitioned" else getattr(slurm, component.name)
    for name, value in (
        ("partition", own.partition or slurm.partition),
        ("constraint", own.constraint or slurm.constraint),
        ("nodelist", own.nodelist),
    ):
        if value is not None:
            yield name, value
    yield "nodes", str(len(component.nodes))
    yield "ntasks-per-node", str(component.tasks_per_node)
    yield "cpus-per-task", str(component.cpus_per_task)
    if (gpus := gpu_request(config.cluster, component.gpus_per_node)) is not None:
        yield gpus
    if component.segment is not None:
        yield "segment", str(component.segment)
    if slurm.exclusive:
        yield "exclusive", None
    repeated = [option for option in slurm.extra if _is_reset(option)] if layout == "hetjob" else []
    for option in [*repeated, *own.extra]:
        yield option, None


def _is_reset(option: str) -> bool:
    name = option.partition("=")[0]
    return name.removeprefix("--") in RESET if name.startswith("--") else name[1:2] in RESET_LETTERS


def _shared(config: Config) -> SlurmComponent:
    """What both components ask of one allocation. Raises UserError where they ask for different things."""
    slurm = config.cluster.slurm
    asked: dict[str, str | None] = {}
    keys: tuple[Literal["partition", "constraint", "nodelist"], ...] = ("partition", "constraint", "nodelist")
    for key in keys:
        trainer, rollout = slurm.asked(key)
        if trainer != rollout and getattr(slurm.allocation, key) is None:
            raise UserError(
                f"launch.layout=partitioned is one allocation, but the trainer asks for {key}={trainer} and the rollout"
                f" for {key}={rollout}; set cluster.slurm.allocation.{key} to what holds the nodes of both, or use"
                " launch.layout=hetjob"
            )
        asked[key] = getattr(slurm.allocation, key) or trainer
    extra = list(dict.fromkeys([*slurm.trainer.extra, *slurm.rollout.extra, *slurm.allocation.extra]))
    return SlurmComponent(**asked, extra=extra)  # type: ignore[arg-type]


def _whole(config: Config, plan: Plan) -> Component:
    """The components of a partitioned plan as one: its nodes are those of all, each large enough for any of them."""
    tasks = max(component.tasks_per_node for component in plan.components)
    cpus = max(component.tasks_per_node * component.cpus_per_task for component in plan.components)
    return Component(
        name="trainer",
        nodes=tuple(node for component in plan.components for node in component.nodes),
        tasks_per_node=tasks,
        cpus_per_task=cpus // tasks,
        gpus_per_node=max(component.gpus_per_node for component in plan.components),
        segment=plan.components[0].segment,
    )


def _option(name: str, value: str | None) -> str:
    flag = name if name.startswith("-") else f"--{name}"
    return f"#SBATCH {flag}" if value is None else f"#SBATCH {flag}={shlex.quote(value)}"


def _body(cluster: Cluster, command: Sequence[str]) -> list[str]:
    lines = list(cluster.setup)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in cluster.environment.items()]
    return [
        *lines,
        "export SUBMITIT_EXECUTOR=slurm",
        "# sbatch --export=... would otherwise choose the environment of every srun below too.",
        "unset SLURM_EXPORT_ENV",
        "# exec: the signal before the time limit goes to this process, which must therefore be the supervisor's.",
        f"exec {shlex.join(command)}",
    ]
