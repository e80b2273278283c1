"""The chain of attempts of one run: what begins the next one, and when the chain must end."""

from __future__ import annotations

from dataclasses import replace

from vime.config import Config
from vime.config.compose import dump_resolved
from vime.plan.plan import Plan
from vime.run.checkpoints import newest_checkpoint
from vime.run.directory import RunDir, Status
from vime.run.files import write_atomic
from vime.run.jsonl import Record, read_lines

MAX_ATTEMPTS_WITHOUT_PROGRESS = 2
"""Attempts in a row without a new checkpoint after which the chain ends itself."""


def begin_attempt(run: RunDir) -> Status:
    """Write the status of the attempt that begins now; returns it.

    A status that is pending was written by the launcher for this attempt. Any other is that of an attempt before,
    however it ended: SLURM has started the job again. An attempt that ended before its roles were started, such as in a
    warm-up, has left nothing to continue from: it is begun again.
    """
    status = run.read_status()
    if status.state not in ("pending", "completed"):
        attempt = next_attempt(run, status)
        status = replace(status, state="pending", attempt=attempt, ended=None, failure=None)
        run.reserve_status()
        run.write_status(status)
    return status


def next_attempt(run: RunDir, status: Status) -> int:
    """The number of the attempt after the one that `status` describes."""
    begun = {event.get("attempt") for event in read_lines(run.events) if event.get("event") == "run_started"}
    return status.attempt + (status.attempt in begun)


def refusals(run: RunDir) -> int:
    """How often since it was last started by hand nodes of the run were refused by the preflight."""
    return len(_refused(run))


def refused_nodes(run: RunDir) -> list[str]:
    """The nodes that were refused since the run was last started by hand."""
    return sorted({str(node) for event in _refused(run) for node in event.get("nodes", [])})


def _refused(run: RunDir) -> list[Record]:
    found: list[Record] = []
    for event in reversed(list(read_lines(run.events))):
        if event.get("event") == "resumed":
            break
        if event.get("event") == "nodes_refused":
            found.append(event)
    return found


def no_progress(run: RunDir) -> str:
    """Why the chain must not go on, from the attempts recorded since it was last started by hand; empty when it may."""
    begun = [newest_checkpoint(run)]
    for event in reversed(list(read_lines(run.events))):
        if event.get("event") == "resumed":
            break
        if event.get("event") == "run_started" and isinstance(event.get("checkpoint"), int):
            begun.append(event["checkpoint"])
    if len(begun) <= MAX_ATTEMPTS_WITHOUT_PROGRESS or len(set(begun[: MAX_ATTEMPTS_WITHOUT_PROGRESS + 1])) > 1:
        return ""
    return (
        f"{MAX_ATTEMPTS_WITHOUT_PROGRESS} attempts in a row made no progress: each began at step {begun[0]} and saved"
        " nothing newer. See their logs; continue by hand with --resume once the cause is gone"
    )


def prepare(run: RunDir, config: Config, plan: Plan) -> None:
    """Write configuration, plan and a pending status into the run's folder."""
    run.reserve_status()
    write_atomic(run.config, dump_resolved(config))
    write_atomic(run.plan, plan.model_dump_json(indent=2) + "\n")
    run.write_status(Status(state="pending"))
