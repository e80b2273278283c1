"""Stay with a run on SLURM to its end: progress, Ctrl-C, and a true status at the end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from submitit.core.core import Job

from vime.run.directory import RunDir, Status, utc_now
from vime.slurm.executor import newest_job
from vime.slurm.scheduler import ENDED, ask, batch_log
from vime.supervise.failure import launcher_failure
from vime.supervise.guardian import close

ASK_INTERVAL = 5.0
"""Seconds between two questions to the controller, which many people ask."""
SILENCE = 30.0
"""Seconds that the last word of a run may take to show here after its job has ended."""
CANCEL_TIMEOUT = 90.0
"""Seconds that a cancelled job gets to end: SLURM's KillWait and the run's own teardown."""


def stay_on_slurm(run: RunDir, job: Job[Any]) -> Status:
    """Show progress until the run has ended; Ctrl-C cancels the job. Returns the true status."""
    from vime.report.progress import follow

    watch = _Watch(run, job)
    try:
        with ended_by_signals():
            follow(run, watch.alive)
    except KeyboardInterrupt:
        _cancel(run, job, watch)
    status = run.read_status()
    if newest_job(run) != job.job_id:
        return status  # it was resumed from elsewhere, and another job answers for it
    if status.state == "requeued" and watch.state in ENDED:
        run.write_status(replace(status, state="running"))  # what it waited for will not happen
    return close(run, launcher_failure("supervisor", batch_log(run, job.job_id)))


class _Watch:
    """Whether the job goes on, asked at most every ASK_INTERVAL seconds."""

    def __init__(self, run: RunDir, job: Job[Any]) -> None:
        self._run, self._job = run, job
        self._asked = 0.0
        self._gone: float | None = None
        self.state = "UNKNOWN"

    def alive(self) -> bool:
        """False once the job has ended and its run had time to say so, or has said so."""
        if time.monotonic() - self._asked > ASK_INTERVAL:
            self._asked = time.monotonic()
            self._job.watcher.update()
            self.state = self._job.watcher.get_state(self._job.job_id, mode="cache")
            if self.state in ENDED and self._gone is None:
                self._gone = time.monotonic()
            elif self.state not in ENDED:
                self._gone = None
        if self._gone is None:
            return True
        return not self._run.read_status().terminal and time.monotonic() - self._gone < SILENCE


def _cancel(run: RunDir, job: Job[Any], watch: _Watch) -> None:
    print(f"cancelling job {job.job_id}", flush=True)
    ask(["scancel", job.job_id])
    deadline = time.monotonic() + CANCEL_TIMEOUT
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait
        while watch.alive() and time.monotonic() < deadline:
            time.sleep(0.2)
    status = run.read_status()
    if not status.terminal and newest_job(run) == job.job_id:
        run.write_status(replace(status, state="cancelled", ended=utc_now()))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it TERM (a CI's time limit) and HUP (a closed terminal) mean what Ctrl-C means."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
