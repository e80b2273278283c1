"""The supervisor's side of the preflight: start it on every node, compare what the nodes say, name the bad ones."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
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


@dataclass(frozen=True)
class NodeProblem:
    """What is wrong with a node."""

    node: str
    what: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what}"


@dataclass
class _Step:
    """The preflight of one component's nodes."""

    hosts: tuple[str, ...]
    output: Path
    popen: subprocess.Popen[bytes]
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
    """Run the preflight on every node of the job, at most cluster.preflight.timeout seconds. Returns what is wrong.

    Raises Stopped when the run is asked to stop meanwhile.
    """
    settings = config.cluster.preflight
    if not settings.checks:
        return []
    folder = run.log("supervisor", 0, attempt).parent / "preflight"
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(8)
    (folder / preflight_node.ASKED).write_text(token)
    steps = [_start(config, plan, component, allocation, folder) for component in plan.components]
    try:
        _wait(steps, settings.timeout, signals)
    finally:
        for step in steps:
            if step.popen.returncode is None:
                signal_group(step.popen.pid, signal.SIGTERM)
    problems = [problem for step in steps for problem in _silent(step, settings.timeout)]
    reports = {node: report for step in steps for node, report in step.reports.items()}
    problems += [NodeProblem(node, what) for node, report in reports.items() for what in report.problems]
    problems += unequal(reports)
    if "clock" in settings.checks:
        problems += skewed({node: skew for step in steps for node, skew in step.skew.items()}, settings.clock_skew)
    if "files" in settings.checks:
        problems += _unseen(reports, folder, token)
    for problem in problems:
        print(f"{utc_now()} preflight: {problem}", flush=True)
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


def _start(config: Config, plan: Plan, component: Component, allocation: Allocation, folder: Path) -> _Step:
    cluster, hosts = config.cluster, allocation.hosts[component.name]
    output = folder / f"{component.name}.step.log"
    output.unlink(missing_ok=True)
    environment = {
        **srun_environment(os.environ),
        **cluster.environment,
        preflight_node.CHECKS: ",".join(cluster.preflight.checks),
        preflight_node.FOLDER: str(folder),
        preflight_node.GPUS: str(component.gpus_per_node if cluster.device == "cuda" else 0),
        INTERFACE: cluster.interface,
    }
    argv = (
        *step_options(config, plan, component, list(hosts), len(hosts), 1, 1, "preflight"),
        *gpu_option(cluster, component.gpus_per_node),
        *container_prefix(config),
        *(python_of(cluster), "-m", "vime.supervise.preflight_node"),
    )
    return _Step(hosts, output, spawn(argv, environment, output))


def _wait(steps: list[_Step], timeout: float, signals: StopSignals) -> None:
    deadline = time.monotonic() + timeout
    running = list(steps)
    while running and time.monotonic() < deadline:
        signals.wait(POLL)
        running = [step for step in running if collect(step.popen) is None]
        for step in steps:
            step.read()


def _silent(step: _Step, timeout: float) -> list[NodeProblem]:
    missing = [host for host in step.hosts if host not in step.reports]
    if not missing:
        return []
    said = [line for line in step.output.read_text(errors="replace").splitlines() if "error" in line]
    why = said[-1] if said else f"no answer within {timeout:g} s"
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
