"""The runs of a sweep: submitted in lanes, one after another on this machine, or each as a task of a job array.

`python -m vime.launch.sweep SWEEP.yaml [cluster=NAME] [recipe=NAME] [dotted.key=value ...]` shows the sweep and the
sbatch command for it. With `--task N` it makes task N ready inside its allocation and prints the script to go on with;
sbatch/sweep.sbatch does that.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, JobPaths

from vime.compose import refuse_repeated
from vime.errors import UserError
from vime.launch.failure import launcher_failure
from vime.launch.guardian import Guard, close
from vime.launch.ready import check_ready
from vime.launch.scheduler import ENDED, ask, batch_log, job_states
from vime.launch.script import batch_command, sbatch_text
from vime.launch.slurm_executor import ENDLESS, JOB_FILE, VimeExecutor, newest_job
from vime.launch.slurm_wait import ASK_INTERVAL, CANCEL_TIMEOUT, SILENCE, ended_by_signals
from vime.launch.submit import discard, new_run, submit
from vime.launch.sweep_members import Alive, Member, array_command, members, plan_member, show
from vime.run_dir import RunDir, utc_now, write_atomic
from vime.sweep import Sweep, read_sweep


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


def prepare_task(sweep: Sweep, index: int, environ: dict[str, str]) -> Path | None:
    """Make the run of one task of an array, in the task's allocation; the script that runs it, or None if it is done.

    A task that SLURM has started again gets the run that it had. Raises UserError for an index that the sweep does not
    have, and for an allocation that is too small.
    """
    if not 0 <= index < len(sweep.combinations):
        raise UserError(
            f"task {index}: the sweep has {len(sweep.combinations)} combinations; use --array=0-"
            f"{len(sweep.combinations) - 1}"
        )
    member = plan_member(sweep, sweep.combinations[index], ("launch.layout=partitioned",), Alive())
    job = environ.get("SLURM_JOB_ID", "")
    nodes = int(environ.get("SLURM_JOB_NUM_NODES", "0"))
    if not job or nodes < member.plan.nodes:
        raise UserError(
            f"combination {index} needs an allocation of {member.plan.nodes} nodes, this one has {nodes};"
            " `python -m vime.launch.sweep SWEEP.yaml` prints the sbatch command"
        )
    run = member.slot.run
    if run is not None and member.slot.state != "completed" and newest_job(run) == job:
        return run.submission
    if not member.due:
        return None
    check_ready(member.config)
    run = new_run(member.config, member.plan)
    run.submitit.mkdir()
    call = DelayedSubmission(Guard(), str(run.path))
    call.set_timeout(0, ENDLESS)
    call.dump(JobPaths(run.submitit, job_id=job).submitted_pickle)
    log = Path("/proc/self/fd/2").readlink()
    if log.is_file():
        # Where whoever asks why the job ended looks for SLURM's notice.
        batch_log(run, job).symlink_to(log)
    command = batch_command(member.config, run.path)
    write_atomic(run.submission, sbatch_text(member.config, member.plan, run_dir=run.path, command=command))
    write_atomic(run.submitit / JOB_FILE, f"{job}\n")
    return run.submission


def main(arguments: Sequence[str]) -> int:
    """See the module. Exit code 2 when the input is wrong."""
    names: dict[str, str] = {}
    given: list[str] = []
    task: int | None = None
    parallel: int | None = None
    remaining = iter(arguments)
    try:
        for argument in remaining:
            key, equals, value = argument.partition("=")
            if argument == "--task":
                task = _number("--task", next(remaining, ""))
            elif argument.startswith("-"):
                raise UserError(f"unknown option {argument}")
            elif not equals and "file" not in names:
                names["file"] = argument
            elif key in ("cluster", "recipe"):
                names[key] = value
            elif key == "sweep.parallel":
                parallel = _number(key, value)
            elif equals:
                given.append(argument)
            else:
                raise UserError(f"{argument!r} is not dotted.key=value")
        if "file" not in names:
            raise UserError("the sweep's file is missing")
        refuse_repeated(given)
        sweep = read_sweep(Path(names["file"]), names.get("cluster"), names.get("recipe"), given)
        if task is not None:
            script = prepare_task(sweep, task, dict(os.environ))
            if script is not None:
                print(script)
            return 0
        found = members(sweep, "launch.layout=partitioned")
        show(found, Console(highlight=False))
        if found[0].config.cluster.scheduler == "slurm":
            print(array_command(sweep, found, [a for a in arguments if not a.startswith("sweep.")], parallel))
    except UserError as error:
        print(f"vime.launch.sweep: {error}", file=sys.stderr)
        return 2
    return 0


def _number(what: str, text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    raise UserError(f"{what} needs a whole number, not {text!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
