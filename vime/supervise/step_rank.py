"""One rank of a step of srun: the parent of a role's process on its node.

`python -m vime.supervise.step_rank COMMAND...` turns what srun says into the contract that a role knows (rank, world
size, address of the node, its GPUs), runs the command in a process group of its own with its own log, and prints one
line for the supervisor when it starts and when it ends. It ends the role when the supervisor is gone (see
`vime.supervise.lifeline`), and leaves nothing of it behind.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vime.plan.plan import Plan
from vime.run.directory import RunDir, utc_now
from vime.run.network import interface_address
from vime.run.role import become_subreaper, die_with_parent
from vime.slurm.environment import without_job
from vime.supervise.lifeline import VARIABLE as LIFELINE
from vime.supervise.lifeline import hold
from vime.supervise.node_cache import node_caches
from vime.supervise.process_tree import kill_descendants, reap_orphans, signal_group
from vime.supervise.processes import KILL_TIMEOUT, collect, signal_name, spawn
from vime.supervise.stop_signals import next_signal

PREFIX = "vime-rank "
"""Start of the lines that are meant for the supervisor, among whatever srun itself prints."""
INTERFACE = "VIME_INTERFACE"
STOP_TIMEOUT = "VIME_STOP_TIMEOUT"
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass(frozen=True)
class RankReport:
    """What one line says. A rank that has ended has an exit code or a signal."""

    rank: int
    node: str
    time: str
    pid: int
    ended: bool = False
    exit_code: int | None = None
    signal: str | None = None
    stopped: bool = False
    """It was told to stop by a signal to this rank, or lost in what SLURM ends as a whole: not a cause by itself."""
    told: bool = False
    """SLURM has told this rank to stop. Its role goes on until the supervisor, which may save first, ends it."""

    def line(self) -> str:
        """The line, without its newline."""
        return PREFIX + json.dumps(asdict(self))


def read_report(line: str) -> RankReport | None:
    """The report in a line of a step's output; None for any other line."""
    if not line.startswith(PREFIX):
        return None
    try:
        return RankReport(**json.loads(line[len(PREFIX) :]))
    except (ValueError, TypeError):
        return None


def role_environment(environ: Mapping[str, str], devices: Sequence[int], host: str) -> dict[str, str]:
    """The environment of the role's process, from that of this rank."""
    role = {
        name: value
        for name, value in environ.items()
        if name.startswith("VIME_") and name not in (LIFELINE, INTERFACE, STOP_TIMEOUT)
    }
    gpus = {}
    if devices:
        # The scheduler may have given this step other GPUs than the first ones.
        visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        named = [visible[device] if visible != [""] else str(device) for device in devices]
        gpus["CUDA_VISIBLE_DEVICES"] = ",".join(named)
    return {
        **without_job(environ),
        **role,
        **gpus,
        "VIME_RANK": environ["SLURM_PROCID"],
        "VIME_WORLD_SIZE": environ["SLURM_NTASKS"],
        "VIME_HOST": host,
        "VIME_NODE": environ.get("SLURMD_NODENAME") or socket.gethostname(),
    }


def run_rank(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `command` as this rank to its end; returns its exit code, 128 + n for signal n."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    run = RunDir(Path(environ["VIME_RUN_DIR"]))
    rank, attempt, name = int(environ["SLURM_PROCID"]), int(environ["VIME_ATTEMPT"]), environ["VIME_ROLE"]
    lifeline = hold(environ[LIFELINE])
    devices = _devices(run, name, rank)
    environment = role_environment(environ, devices, interface_address(environ[INTERFACE]))
    process = spawn(command, {**node_caches(environment), **environment}, run.log(name, rank, attempt))
    report = RankReport(rank, environment["VIME_NODE"], utc_now(), process.pid)
    _say(report)
    stopped = _watch(process, lifeline, float(environ[STOP_TIMEOUT]), replace(report, told=True))
    code = process.returncode
    kill_descendants(os.getpid(), KILL_TIMEOUT)
    ended = RankReport(
        rank=rank,
        node=report.node,
        time=utc_now(),
        pid=process.pid,
        ended=True,
        exit_code=None if code < 0 else code,
        signal=signal_name(-code) if code < 0 else None,
        stopped=stopped,
    )
    _say(ended)
    return 128 - code if code < 0 else code


def _say(report: RankReport) -> None:
    try:
        print(report.line(), flush=True)
    except OSError:
        pass  # srun is gone, and with it whoever would read this


def _devices(run: RunDir, name: str, rank: int) -> tuple[int, ...]:
    roles = Plan.model_validate_json(run.plan.read_bytes()).roles
    processes = next((role.processes for role in roles if role.name == name), ())
    return processes[rank].devices if rank < len(processes) else ()


def _watch(process: subprocess.Popen[bytes], lifeline: socket.socket, stop_timeout: float, told: RankReport) -> bool:
    """Wait for the end of the role, ending it when asked to. Returns whether it was asked.

    A first TERM may be the start of a preemption's grace time, of which the batch step hears nothing: it is passed to
    the supervisor, by `told`, and the lifeline closes when the role is to end. A second one ends the role.
    """
    asked = 0
    deadline: float | None = None
    while collect(process) is None:
        if next_signal(_WATCHED, 0.1) not in (None, signal.SIGCHLD):
            asked += 1
            if asked == 1:
                _say(replace(told, time=utc_now()))
        if deadline is None and (asked > 1 or _closed(lifeline)):
            deadline = time.monotonic() + stop_timeout
            signal_group(process.pid, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            signal_group(process.pid, signal.SIGKILL)
        reap_orphans(frozenset({process.pid}))
    return deadline is not None or asked > 0


def _closed(lifeline: socket.socket) -> bool:
    readable, _, _ = select.select([lifeline], [], [], 0)
    if not readable:
        return False
    try:
        return lifeline.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> int:
    """Entry point: the arguments are the command."""
    die_with_parent()
    become_subreaper()
    return run_rank(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
