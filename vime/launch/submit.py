"""Submit one run to this machine and, when asked, stay with it to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from submitit.local.local import LocalJob

from vime.config import Config
from vime.launch.failure import GRACE, launcher_failure
from vime.launch.guardian import SUPERVISOR, close, guard
from vime.launch.local_executor import DetachedLocalExecutor
from vime.launch.prepare import prepare
from vime.launch.process_tree import descendants
from vime.launch.processes import KILL_TIMEOUT
from vime.plan import Plan
from vime.run_dir import RunDir, Status, utc_now

Process = subprocess.Popen[bytes]
"""submitit's controller of the job: the top of the run's processes."""


def submit(config: Config, plan: Plan, *, wait: bool, supervisor: Sequence[str] = SUPERVISOR) -> int:
    """Make the run directory, submit the run, and print the directory as the last line.

    With `wait`, shows progress and returns when the run has ended: 0 completed, 1 anything else; Ctrl-C (or TERM, or a
    closed terminal) cancels the run. Without, returns 0 at once. Raises UserError when the directory cannot be made.
    """
    run = RunDir.create(config.run.root, config.run.name, config.recipe)
    prepare(run, config, plan)
    job = DetachedLocalExecutor(run).submit(guard, str(run.path), tuple(supervisor))
    if not wait:
        print(run.path, flush=True)
        return 0
    status = stay(run, job, config.cluster.stop_timeout)
    from vime.report.summary import print_summary

    print_summary(run)
    print(run.path, flush=True)
    return 0 if status.state == "completed" else 1


def stay(run: RunDir, job: LocalJob[Any], stop_timeout: float) -> Status:
    """Show progress until the run has ended, whatever ends it, and return its true status."""
    from vime.report.progress import follow

    process: Process = job._process
    longest = stop_timeout + GRACE + 3 * KILL_TIMEOUT
    try:
        with _ended_by_signals():
            follow(run, lambda: process.poll() is None)
            if not _settle(run, process, longest):
                _kill(process)
    except KeyboardInterrupt:
        _cancel(run, process, longest)
    except BaseException:  # a launcher that cannot stay does not leave a run behind
        _cancel(run, process, longest)
        raise
    return close(run, launcher_failure("supervisor", run.log("supervisor", 0, run.read_status().attempt)))


def _cancel(run: RunDir, process: Process, timeout: float) -> None:
    print("stopping the run", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait
        process.terminate()
        if _settle(run, process, timeout):
            return
    _kill(process)
    status = run.read_status()
    if not status.terminal:
        run.write_status(replace(status, state="cancelled", ended=utc_now()))


def _kill(process: Process) -> None:
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _settle(run: RunDir, process: Process, timeout: float) -> bool:
    """Wait until the status is final and the job's process has ended: the supervisor may outlive a killed one."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None and run.read_status().terminal:
            return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    # TERM (a CI's time limit) and HUP (a closed terminal) mean what Ctrl-C means: this launcher stays with the run.
    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
