"""How a run stands: its state, since when, and whether anything of it still lives."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from vime.config.section import Frozen
from vime.errors import UserError
from vime.run.directory import RunDir, State, Status

QUIET_LIMIT = 300.0  # seconds without any write after which a run that says it is running counts as lost


class Outcome(Frozen):
    """State of a run at the time of the report."""

    state: State | Literal["unknown"]
    """As status.json says; unknown when it does not read."""
    lost_contact: bool
    """The state is running, but nothing of the run has written for longer than a run that lives would stay silent."""
    going: bool
    """Not ended, and not lost."""
    attempt: int
    started: str | None
    ended: str | None
    duration: float | None
    """Seconds from `started` to `ended`, to now while going, to the last sign of life when lost."""
    heartbeat: str | None
    """Time of the newest write to metrics, events, status or a log of the run."""
    heartbeat_age: float | None
    """Seconds since then, at the time of the report."""


def read_outcome(
    run: RunDir, slowest_step: float | None = None, now: float | None = None
) -> tuple[Outcome, Status | None]:
    """The outcome, and the status it rests on (None when status.json does not read).

    now: seconds since the epoch; by default as the disk of the run tells the time, to which writes there are compared.
    `slowest_step`: seconds of the run's longest step; a run is not lost before five of those have passed in silence.
    """
    try:
        status: Status | None = run.read_status()
    except UserError:
        status = None
    if now is None:
        now = time.time() if status is not None and status.terminal else clock_there(run.path)
    beat = max(_write_times(run), default=None)
    age = None if beat is None else max(0.0, now - beat)
    state: State | Literal["unknown"] = status.state if status else "unknown"
    ended_for_good = status.terminal if status else False
    limit = max(QUIET_LIMIT, 5 * (slowest_step or 0.0))
    lost = not ended_for_good and state in ("running", "unknown") and age is not None and age > limit
    start = seconds_of(status.started if status else None)
    end = seconds_of(status.ended if status else None)
    stop = end if end is not None else beat if lost or ended_for_good else now
    outcome = Outcome(
        state=state,
        lost_contact=lost,
        going=not ended_for_good and not lost,
        attempt=status.attempt if status else 1,
        started=status.started if status else None,
        ended=status.ended if status else None,
        duration=None if start is None or stop is None else max(0.0, stop - start),
        heartbeat=None if beat is None else _iso(beat),
        heartbeat_age=age,
    )
    return outcome, status


def clock_there(folder: Path) -> float:
    """The time by the clock that dates the files of `folder`: that of a file written there just now.

    A login node's own clock may be minutes from that of a file server. It is used where nothing can be written.
    """
    probe = folder / f".clock.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"\n")
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            probe.unlink(missing_ok=True)
    except OSError:
        return time.time()


def seconds_of(moment: str | None) -> float | None:
    """Seconds since the epoch of an ISO 8601 time; None when it is absent or does not read. No zone means UTC."""
    if not moment:
        return None
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        return None
    seconds = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    return seconds if math.isfinite(seconds) else None


def _write_times(run: RunDir) -> Iterator[float]:
    """When the files that a living run writes to were last written."""
    warmup = RunDir(run.path / "warmup")
    files = [*(f for r in (run, warmup) for f in (r.status, r.metrics, r.events))]
    for folder in (run.logs / "latest", warmup.logs / "latest"):
        files += folder.glob("*.log")
    for file in files:
        written = _modified(file)
        if written is not None:
            yield written


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
