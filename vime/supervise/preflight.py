"""The supervisor's side of the preflight: start it on every node, compare what the nodes say, name the bad ones."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vime.config import Config
from vime.plan.plan import Component, Plan
from vime.run.directory import RunDir, utc_now
from vime.slurm.allocation import Allocation
from vime.slurm.environment import srun_environment
from vime.slurm.srun import container_prefix, gpu_option, python_of, step_options
from vime.supervise import preflight_node
from vime.supervise.preflight_node import NodeReport, read_node_report
from vime.supervise.process_tree import signal_group
from vime.supervise.processes import collect, spawn
from vime.supervise.step_rank import INTERFACE
from vime.supervise.stop_signals import StopSignals

POLL = 0.25
HOST_CHECKS = ("gpus", "nvlink", "clock")
"""Made outside the container, whose image need not have the tools."""
MAX_TOLD = 10
"""Nodes of a shared fault that are told one by one."""


@dataclass(frozen=True)
class NodeProblem:
    """What is wrong with a node."""

    node: str
    what: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what}"

    @property
    def kind(self) -> str:
        """The check that found it."""
        return self.what.partition(":")[0]


@dataclass
class _Step:
    """The preflight of one component's nodes."""

    hosts: tuple[str, ...]
    output: Path
    popen: subprocess.Popen[bytes]
    limit: float
    """Seconds that it may take."""
    reports: dict[str, NodeReport] = field(default_factory=dict)
    skew: dict[str, float] = field(default_factory=dict)
    """Node -> seconds between its clock when it printed and this one's when that was read."""

    def read(self) -> None:
        """Take the reports that have come."""
        for line in self.output.read_text(errors="replace").splitlines():
            report = read_node_report(line)
            if report is not None and report.node not in self.reports:
                self.reports[report.node] = report
                self.skew[report.node] = report.time - time.time()


def check_nodes(
    run: RunDir, config: Config, plan: Plan, allocation: Allocation, signals: StopSignals, attempt: int
) -> list[NodeProblem]:
    """Run the preflight on every node of the job, within cluster.preflight's times. Returns what is wrong.

    With a container there are two parts: what is the node's own is checked on the host, in seconds; then what the roles
    will see, in the container. Raises Stopped when the run is asked to stop meanwhile.
    """
    settings, contained = config.cluster.preflight, config.cluster.container.kind != "none"
    own = [check for check in settings.checks if check in HOST_CHECKS or not contained]
    inside = [check for check in settings.checks if check not in own]
    problems: list[NodeProblem] = []
    if own:
        problems = _check(run, config, plan, allocation, signals, attempt, own, contained=False)
    if inside and not problems:
        problems = _check(run, config, plan, allocation, signals, attempt, inside, contained=True)
    for problem in problems:
        print(f"{utc_now()} preflight: {problem}", flush=True)
    return problems


def shared_fault(problems: Sequence[NodeProblem], hosts: Mapping[str, Sequence[str]]) -> str | None:
    """What most nodes of a component, or of the job, have wrong alike, in one line; None where it is some nodes' own.

    A wrong interface or image is wrong everywhere: other nodes would not be better. hosts: component -> its nodes.
    """
    every = sorted({node for nodes in hosts.values() for node in nodes})
    for where, nodes in [*((f"the {name} component", nodes) for name, nodes in hosts.items()), ("the job", every)]:
        for kind in dict.fromkeys(problem.kind for problem in problems):
            alike = {
                problem.node: problem.what for problem in problems if problem.kind == kind and problem.node in nodes
            }
            if len(nodes) > 1 and len(alike) > len(nodes) / 2:
                return f"{len(alike)} of {len(nodes)} nodes of {where}: {next(iter(alike.values()))}"
    return None


def _check(
    run: RunDir,
    config: Config,
    plan: Plan,
    allocation: Allocation,
    signals: StopSignals,
    attempt: int,
    checks: Sequence[str],
    *,
    contained: bool,
) -> list[NodeProblem]:
    settings = config.cluster.preflight
    folder = run.log("supervisor", 0, attempt).parent / "preflight"
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(8)
    (folder / preflight_node.ASKED).write_text(token)
    steps = [
        _start(config, plan, component, allocation, folder, checks, contained=contained)
        for component in plan.components
    ]
    try:
        _wait(steps, signals)
    finally:
        for step in steps:
            if step.popen.returncode is None:
                signal_group(step.popen.pid, signal.SIGTERM)
    problems = [problem for step in steps for problem in _silent(step)]
    reports = {node: report for step in steps for node, report in step.reports.items()}
    problems += [NodeProblem(node, what) for node, report in reports.items() for what in report.problems]
    for what, nodes in Counter(what for report in reports.values() for what in report.unchecked).items():
        print(f"{utc_now()} preflight: not checked on {nodes} nodes: {what}", flush=True)
    problems += unequal(reports)
    if "clock" in checks:
        problems += skewed({node: skew for step in steps for node, skew in step.skew.items()}, settings.clock_skew)
    if "files" in checks:
        problems += _unseen(reports, folder, token)
    return problems


def unequal(reports: Mapping[str, NodeReport]) -> list[NodeProblem]:
    """Nodes whose version of a package is not the one that most nodes have."""
    problems = []
    for name in sorted({name for report in reports.values() for name in report.versions}):
        there = {node: report.versions.get(name, "none") for node, report in reports.items()}
        usual = Counter(there.values()).most_common(1)[0][0]
        problems += [
            NodeProblem(node, f"versions: {name} is {version}, elsewhere {usual}")
            for node, version in there.items()
            if version != usual
        ]
    return problems


def skewed(skew: Mapping[str, float], limit: float) -> list[NodeProblem]:
    """Nodes whose clock differs from this one's by more than `limit` seconds. A line may be late, never early."""
    return [
        NodeProblem(
            node, f"clock: {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the supervisor's node"
        )
        for node, seconds in skew.items()
        if abs(seconds) > limit
    ]


def _start(
    config: Config,
    plan: Plan,
    component: Component,
    allocation: Allocation,
    folder: Path,
    checks: Sequence[str],
    *,
    contained: bool,
) -> _Step:
    cluster, hosts = config.cluster, allocation.hosts[component.name]
    output = folder / f"{component.name}{'.container' if contained else ''}.step.log"
    output.unlink(missing_ok=True)
    environment = {
        **srun_environment(os.environ),
        **cluster.environment,
        preflight_node.CHECKS: ",".join(checks),
        preflight_node.FOLDER: str(folder),
        preflight_node.GPUS: str(component.gpus_per_node if cluster.device == "cuda" else 0),
        INTERFACE: cluster.interface,
    }
    argv = (
        *step_options(config, plan, component, list(hosts), len(hosts), 1, 1, "preflight", contained=contained),
        *gpu_option(cluster, component.gpus_per_node),
        *(container_prefix(config) if contained else ()),
        *(python_of(cluster) if contained else sys.executable, "-m", "vime.supervise.preflight_node"),
    )
    limit = cluster.preflight.container_timeout if contained else cluster.preflight.timeout
    return _Step(hosts, output, spawn(argv, environment, output), limit)


def _wait(steps: list[_Step], signals: StopSignals) -> None:
    begun = time.monotonic()
    running = list(steps)
    while running and time.monotonic() < begun + max(step.limit for step in running):
        signals.wait(POLL)
        running = [step for step in running if collect(step.popen) is None]
        for step in steps:
            step.read()


def _silent(step: _Step) -> list[NodeProblem]:
    missing = [host for host in step.hosts if host not in step.reports]
    if not missing:
        return []
    said = [line for line in step.output.read_text(errors="replace").splitlines() if "error" in line]
    why = said[-1] if said else f"no answer within {step.limit:g} s"
    return [NodeProblem(host, f"the preflight did not run: {why}") for host in missing]


def _unseen(reports: Mapping[str, NodeReport], folder: Path, token: str) -> list[NodeProblem]:
    """Nodes that wrote their file where it does not show here within a bounded time."""
    deadline = time.monotonic() + preflight_node.FILE_TIMEOUT
    waiting = {
        node for node, report in reports.items() if not any(what.startswith("files") for what in report.problems)
    }
    while waiting:
        waiting = {node for node in waiting if not _holds(folder / f"{node}.txt", token)}
        if time.monotonic() > deadline:
            break
        time.sleep(0.1 if waiting else 0)
    return [NodeProblem(node, f"files: what it wrote into {folder} does not show here") for node in sorted(waiting)]


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False
