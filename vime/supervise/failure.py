"""Which of several ends was the cause, and what `status.json` says about it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from vime.config.cluster import Cluster
from vime.run.directory import Failure, RunDir, State, node_name, utc_now
from vime.slurm.allocation import Allocation
from vime.slurm.scheduler import batch_log, job_fate, output_of
from vime.supervise.processes import End
from vime.supervise.stop_signals import Stopped

GRACE = 1.0
"""Seconds after the first unexpected end in which further ends are collected before one is named the cause."""
TAIL_LINES = 40
_TAIL_BYTES = 1 << 16


def first_cause(ends: Sequence[End]) -> End:
    """The end to name, of those within GRACE seconds of each other.

    When one process dies, those that talk to it follow within a moment: by an exception (exit code 1) or, from C++, by
    SIGABRT. Nothing in a run sends another process SIGKILL, SIGSEGV and the like because of a broken connection. So an
    end by a signal other than SIGABRT comes before every other, and the earliest comes before the later.
    """
    return min(ends, key=lambda end: (end.signal in (None, "SIGABRT", "SIGPIPE"), end.seconds))


def describe(end: End) -> Failure:
    """The failure record of a role's end."""
    return Failure(
        role=end.command.role,
        rank=end.rank,
        node=end.node,
        exit_code=end.exit_code,
        signal=end.signal,
        time=end.time,
        log=str(end.log),
        tail=tail(end.log),
    )


def launcher_failure(role: str, log: Path, exit_code: int | None = None, signal: str | None = None) -> Failure:
    """The failure record of a process of the launcher: supervisor or guardian. How it ended may be unknown."""
    return Failure(role, 0, node_name(), exit_code, signal, utc_now(), str(log), tail(log))


def stop_outcome(
    stop: Stopped, run: RunDir, cluster: Cluster, allocation: Allocation | None
) -> tuple[State, Failure | None]:
    """State and failure of a run that was stopped by a signal.

    A guardian that ended without a word was killed: that is a failure. USR2 announces the time limit or preemption:
    the run goes on where SLURM can start it again. TERM has the reason that SLURM gives for it; elsewhere someone
    cancelled the run.
    """
    if stop.orphaned:
        return "failed", launcher_failure("guardian", run.log("supervisor", 0, run.read_status().attempt))
    if stop.signum == signal.SIGUSR2:
        return ("requeued" if allocation is not None and cluster.slurm.requeue else "timeout"), None
    if allocation is None:
        return "cancelled", None
    log = batch_log(run, allocation.job_id)
    fate = job_fate(allocation.job_id, log, *output_of(os.getppid()))
    if fate == "requeued" and not cluster.slurm.requeue:
        # Preempted, or a node was lost, and nobody starts the job again. SLURM's words are the log.
        return "failed", launcher_failure("supervisor", log)
    return fate, None


def tail(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log, [] when it cannot be read. Reads at most the last 64 KiB."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]
