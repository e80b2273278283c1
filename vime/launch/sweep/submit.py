"""The runs of a sweep: submitted in lanes, or one after another on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from submitit.core.core import Job

from vime.errors import UserError
from vime.launch.checks import check_ready
from vime.launch.submit import discard, new_run, submit
from vime.launch.sweep.file import Sweep
from vime.launch.sweep.members import Member, members, show
from vime.launch.wait import ASK_INTERVAL, CANCEL_TIMEOUT, SILENCE, ended_by_signals
from vime.run.directory import RunDir, utc_now
from vime.slurm.executor import SubmissionUnknown, VimeExecutor
from vime.slurm.scheduler import ENDED, ask, batch_log, job_states
from vime.supervise.failure import launcher_failure
from vime.supervise.guardian import Guard, close


def submit_sweep(sweep: Sweep, parallel: int | None, *, wait: bool | None) -> int:
    """Submit every combination that is not completed and does not go on; at most `parallel` run at once.

    On SLURM each lane is a chain of dependencies; on a local cluster one follows the other. Prints the sweep's folder
    as the last line. Returns 0 when all combinations that were waited for are completed, else 1. Raises UserError.
    """
    found = members(sweep)
    due = [member for member in found if member.due]
    for member in due:
        check_ready(member.config)
    show(found, Console(highlight=False))
    folder = found[0].config.run.root
    local = found[0].config.cluster.scheduler == "local"
    if local and wait is False:
        raise UserError("on a local cluster the runs of a sweep follow each other; leave --no-wait out")
    if local:
        codes = [submit(member.config, member.plan, wait=True) for member in due]
        done = not any(codes)
    else:
        jobs = _submit_lanes(due, parallel or sweep.parallel or len(due))
        done = _wait(jobs) if wait else True
    if local or wait:
        from vime.report.compare import compare, render_comparison

        render_comparison(compare(folder), Console(highlight=False))
    print(folder, flush=True)
    return 0 if done else 1


def _submit_lanes(due: Sequence[Member], lanes: int) -> list[tuple[RunDir, Job[Any]]]:
    jobs: list[tuple[RunDir, Job[Any]]] = []
    for index, member in enumerate(due):
        # After the lane's last job, whatever became of it.
        dependency = f"afterany:{jobs[index - lanes][1].job_id}" if index >= lanes else None
        run = new_run(member.config, member.plan)
        try:
            job = VimeExecutor(run, member.config, member.plan, dependency).submit(Guard(), str(run.path))
        except UserError as error:
            if not isinstance(error, SubmissionUnknown):
                discard(run)
            raise UserError(f"{error}; {index} of {len(due)} runs of the sweep are submitted") from None
        jobs.append((run, job))
        print(f"job {job.job_id}  {run.path.name}" + (f"  {dependency}" if dependency else ""), flush=True)
    return jobs


def _wait(jobs: Sequence[tuple[RunDir, Job[Any]]]) -> bool:
    """Stay until every run has ended; Ctrl-C cancels those that have not. Returns whether all are completed."""
    gone: dict[str, float] = {}
    told: set[str] = set()
    try:
        with ended_by_signals():
            while True:
                open_jobs = []
                for run, job in jobs:
                    status = run.read_status()
                    if not status.terminal:
                        open_jobs.append((run, job))
                    elif job.job_id not in told:
                        told.add(job.job_id)
                        print(f"{utc_now()} {run.path.name} {status.state} ({len(told)} of {len(jobs)})", flush=True)
                states = job_states([job.job_id for _, job in open_jobs])
                for _, job in open_jobs:
                    if states.get(job.job_id) in ENDED:
                        gone.setdefault(job.job_id, time.monotonic())
                # A job that ended without a last word of its run gets some time for it: files show late on NFS.
                late = [
                    job for _, job in open_jobs if time.monotonic() - gone.get(job.job_id, time.monotonic()) > SILENCE
                ]
                if len(late) == len(open_jobs):
                    break
                time.sleep(ASK_INTERVAL)
    except KeyboardInterrupt:
        _cancel([(run, job) for run, job in jobs if not run.read_status().terminal])
        return False
    return all(
        close(run, launcher_failure("supervisor", batch_log(run, job.job_id))).state == "completed" for run, job in jobs
    )


def _cancel(left: Sequence[tuple[RunDir, Job[Any]]]) -> None:
    print(f"cancelling {len(left)} jobs", flush=True)
    # Last lane first: a job whose predecessor ends would start.
    ask(["scancel", *(job.job_id for _, job in reversed(left))])
    deadline = time.monotonic() + CANCEL_TIMEOUT
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait
        while time.monotonic() < deadline:
            states = job_states([job.job_id for run, job in left if not run.read_status().terminal])
            if all(state in ENDED for state in states.values()):
                break
            time.sleep(1)
    for run, _ in left:
        status = run.read_status()
        if not status.terminal:  # it never began
            run.write_status(replace(status, state="cancelled", ended=utc_now()))
