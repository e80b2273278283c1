"""Which of several ends was the cause, and what `status.json` says about it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vime.buffer.control import Beat
from vime.config.cluster import Cluster
from vime.run.directory import Failure, RunDir, State, node_name, utc_now
from vime.run.files import disk_problem
from vime.run.jsonl import read_lines
from vime.slurm.allocation import Allocation
from vime.slurm.scheduler import batch_log, job_fate, output_of
from vime.supervise.processes import End
from vime.supervise.stop_signals import Stopped

GRACE = 1.0
"""Seconds after the first unexpected end in which further ends are collected before one is named the cause."""
SILENCE = 40.0
"""Seconds without a sign of life, while others gave theirs, after which a rank does not answer: four beats missed."""
TAIL_LINES = 40
TOO_EARLY = "exited 0 before its work was done: did a function that runs in it call os._exit?"
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
    shown = tail(end.log)
    if end.succeeded:  # it was a failure all the same
        shown.append(f"{end.command.role}-{end.rank} {TOO_EARLY}")
    return Failure(
        role=end.command.role,
        rank=end.rank,
        node=end.node,
        exit_code=end.exit_code,
        signal=end.signal,
        time=end.time,
        log=str(end.log),
        tail=shown,
    )


def silent_ranks(beats: Mapping[int, Beat]) -> list[int]:
    """The ranks that have given no sign of life for SILENCE seconds when others did, the longest silent first."""
    newest = max((beat.time for beat in beats.values()), default=0.0)
    return sorted((r for r, beat in beats.items() if newest - beat.time > SILENCE), key=lambda r: beats[r].time)


def describe_silent(end: End, beats: Mapping[int, Beat], log: Callable[[int], Path]) -> Failure | None:
    """The failure record of a trainer rank that does not answer, where `end` came of waiting for it; else None.

    beats: of the trainers. log: where a rank of them writes. A process that was killed is a cause by itself.
    """
    silent = silent_ranks(beats)
    if not silent or end.signal not in (None, "SIGABRT"):
        return None
    rank = silent[0]
    beat, newest = beats[rank], max(other.time for other in beats.values())
    others = f", nor have {len(silent) - 1} others of {len(beats)}" if len(silent) > 1 else ""
    places = Counter(other.place for r, other in beats.items() if r not in silent)
    stood = "; ".join(f"{count} at {place}" for place, count in places.most_common(3))
    said = [
        f"trainer-{rank} on {beat.node} has given no sign of life for {newest - beat.time:.0f} s{others}: it stood at"
        f" {beat.place} since {newest - beat.since:.0f} s. The other ranks: {stood}",
        f"{end} meanwhile: {next(iter(tail(end.log, 1)), 'without a word')}",
    ]
    own = log(rank)
    return Failure("trainer", rank, beat.node, None, None, utc_now(), str(own), [*said, *tail(own, TAIL_LINES - 2)])


def finished(end: End, run: RunDir, attempt: int) -> bool:
    """Whether the role had done its work when it exited 0, which the generator says by an event.

    Whatever runs in it, such as a function of the user's, can exit 0 at any moment: os._exit(0) asks nobody.
    """
    if end.command.role != "generator":
        return True
    said = (event for event in read_lines(run.events) if event.get("event") == "stopped")
    return any(event.get("role") == "generator" and event.get("attempt") == attempt for event in said)


def launcher_failure(role: str, log: Path, exit_code: int | None = None, signal: str | None = None) -> Failure:
    """The failure record of a process of the launcher: supervisor or guardian. How it ended may be unknown."""
    return Failure(role, 0, node_name(), exit_code, signal, utc_now(), str(log), tail(log))


def with_disk(failure: Failure, run: RunDir) -> Failure:
    """The failure, with a last line that says so if the run's folder cannot be written: a log on a full disk cannot."""
    problem = disk_problem(run.path)
    return failure if problem is None else replace(failure, tail=[*failure.tail, problem])


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
