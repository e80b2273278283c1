"""Submit one run, to this machine or to SLURM, and, when asked, stay with it to its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from submitit.core.core import Job
from submitit.local.local import LocalJob

from vime.config import Config
from vime.config.compose import override_resolved
from vime.errors import UserError
from vime.launch.checks import check_unchanged
from vime.launch.holder import held
from vime.launch.local_executor import DetachedLocalExecutor
from vime.launch.wait import ended_by_signals, stay_on_slurm
from vime.plan.checks import check_model
from vime.plan.plan import Plan, make_plan
from vime.run.checkpoints import newest
from vime.run.directory import RunDir, Status, utc_now
from vime.run.files import write_atomic
from vime.run.role import Role
from vime.slurm.executor import SubmissionUnknown, VimeExecutor, newest_job
from vime.slurm.scheduler import in_queue
from vime.supervise.failure import GRACE, launcher_failure
from vime.supervise.guardian import SUPERVISOR, Guard, close
from vime.supervise.lifecycle import next_attempt, prepare
from vime.supervise.process_tree import descendants
from vime.supervise.processes import KILL_TIMEOUT

ENDING = 10.0
"""Seconds that the processes of an attempt with a final status get to end before the next one."""
Process = subprocess.Popen[bytes]
"""submitit's controller of the job: the top of the run's processes."""


def submit(config: Config, plan: Plan, *, wait: bool, supervisor: Sequence[str] = SUPERVISOR) -> int:
    """Make the run directory, submit the run, and print the directory as the last line.

    With `wait`, shows progress and returns when the run has ended: 0 completed, 1 anything else; Ctrl-C (or TERM, or a
    closed terminal) cancels the run. Without, returns 0 at once. Raises UserError when the directory cannot be made.
    """
    run = new_run(config, plan)
    try:
        job = _executor(run, config, plan).submit(Guard(tuple(supervisor)), str(run.path))
    except SubmissionUnknown:
        raise
    except UserError:
        discard(run)
        raise
    except OSError as error:
        discard(run)
        raise _unwritable(run, error) from error
    return _attend(run, config, job, wait)


def new_run(config: Config, plan: Plan) -> RunDir:
    """The directory of a run that is about to be submitted. Raises UserError when it cannot be made."""
    run = RunDir.create(config.run.root, config.run.name, config.recipe)
    try:
        prepare(run, config, plan)
    except OSError as error:
        discard(run)
        raise _unwritable(run, error) from error
    return run


def _unwritable(run: RunDir, error: OSError) -> UserError:
    return UserError(f"{run.path} cannot be written: {error.strerror}")


def discard(run: RunDir) -> None:
    """Remove the directory of a run that was refused before any of it began, and a run.root that holds no other."""
    shutil.rmtree(run.path)
    with contextlib.suppress(OSError):
        run.path.parent.rmdir()


def resume(path: Path, overrides: Sequence[str], *, wait: bool | None, supervisor: Sequence[str] = SUPERVISOR) -> int:
    """Continue the run in `path` as its next attempt, with `overrides` of its configuration. Otherwise as `submit`.

    Raises UserError for a folder that holds no run, for a run that still goes on or is completed, and for overrides
    that do not fit.
    """
    run = RunDir(path.resolve())
    run.read_status()  # it is a run, before anything is written into it
    with held(run):
        config, job = _resubmit(run, overrides, supervisor)
    wait = config.cluster.scheduler == "local" if wait is None else wait
    return _attend(run, config, job, wait)


def _resubmit(run: RunDir, overrides: Sequence[str], supervisor: Sequence[str]) -> tuple[Config, Job[Any]]:
    """The next attempt of a run that this process holds."""
    status = run.read_status()
    config = override_resolved(run.config, overrides, check=check_model)
    plan = make_plan(config)
    if status.state == "completed":
        raise UserError(f"{run.path} is completed: there is nothing to resume")
    if _alive(run, config, supervisor, status, ENDING if status.terminal else 0.0):
        raise UserError(f"{run.path} still goes on (state {status.state}); cancel it first, or wait for its end")
    attempt = next_attempt(run, status)
    if attempt > 1:
        # Without a checkpoint, or with a setting or data that must not change, nothing is overwritten or submitted.
        check_unchanged(config, newest(run.checkpoints, config)[0].facts.cursor)
    before = {file: file.read_bytes() for file in (run.config, run.plan, run.submission, run.status) if file.exists()}
    try:
        prepare(run, config, plan)
        run.write_status(replace(status, state="pending", attempt=attempt, ended=None, failure=None))
        run.append_event(launcher_role(run, attempt), "resumed", overrides=list(overrides))
    except OSError as error:
        raise _unwritable(run, error) from error
    try:
        job = _executor(run, config, plan).submit(Guard(tuple(supervisor)), str(run.path))
    except SubmissionUnknown:
        raise
    except UserError:
        for file, content in before.items():  # nothing runs: the run is as it was
            write_atomic(file, content)
        raise
    return config, job


def _executor(run: RunDir, config: Config, plan: Plan) -> VimeExecutor | DetachedLocalExecutor:
    return VimeExecutor(run, config, plan) if config.cluster.scheduler == "slurm" else DetachedLocalExecutor(run)


def _attend(run: RunDir, config: Config, job: Job[Any], wait: bool) -> int:
    """What the launcher does once a run is submitted; returns its exit code."""
    on_slurm = config.cluster.scheduler == "slurm"
    if on_slurm:
        print(f"submitted job {job.job_id}", flush=True)
    if not wait:
        print(run.path, flush=True)
        return 0
    status = stay_on_slurm(run, job) if on_slurm else stay(run, job, config.cluster.stop_timeout)
    from vime.report.render import print_summary  # rich is only loaded to print

    print_summary(run)
    print(run.path, flush=True)
    return 0 if status.state == "completed" else 1


def launcher_role(run: RunDir, attempt: int) -> Role:
    """Who the launcher is in the events of a run."""
    return Role(run.path, "", 0, "launcher", attempt, "", 0, 1, "", Path())


def _alive(run: RunDir, config: Config, supervisor: Sequence[str], status: Status, patience: float) -> bool:
    """Whether an attempt may still be running: on SLURM, where no answer means that it may, or here.

    On SLURM a final status is believed. Here its processes count, which get `patience` seconds to end.
    """
    if config.cluster.scheduler == "slurm":
        job = newest_job(run)
        return not status.terminal and job is not None and in_queue(job) is not False
    deadline = time.monotonic() + patience
    while any(
        _is_of(process.info["cmdline"] or [], run, supervisor[-1]) for process in psutil.process_iter(["cmdline"])
    ):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


def _is_of(command: Sequence[str], run: RunDir, supervisor: str) -> bool:
    """Whether a command line is that of a run's supervisor, or of submitit's controller or its job, by any path."""
    if supervisor in command:
        folder = run.path
    elif any(word.startswith("submitit.") for word in command):
        folder = run.submitit
    else:
        return False
    return any(word.startswith("/") and Path(word).resolve() == folder for word in command)


def stay(run: RunDir, job: LocalJob[Any], stop_timeout: float) -> Status:
    """Show progress until the run has ended, whatever ends it, and return its true status."""
    from vime.report.progress import follow

    process: Process = job._process
    attempt = run.read_status().attempt
    longest = stop_timeout + GRACE + 3 * KILL_TIMEOUT
    try:
        with ended_by_signals():
            follow(run, lambda: process.poll() is None)
            if not _settle(run, process, longest):
                _kill(process)
    except KeyboardInterrupt:
        _cancel(run, process, longest, attempt)
    except BaseException:  # a launcher that cannot stay does not leave a run behind
        _cancel(run, process, longest, attempt)
        raise
    return close(run, launcher_failure("supervisor", run.log("supervisor", 0, attempt)), attempt)


def _cancel(run: RunDir, process: Process, timeout: float, attempt: int) -> None:
    print("stopping the run", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait
        process.terminate()
        if _settle(run, process, timeout):
            return
    _kill(process)
    status = run.read_status()
    if status.attempt == attempt and not status.terminal:
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
