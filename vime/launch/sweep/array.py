"""A sweep as a job array: the sbatch command for it, and what each of its tasks does inside its allocation.

All tasks of an array ask for the same: what the largest combination needs. Which that is only the plan knows, so an
array that was submitted without it is submitted again, with it, by its first task.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from submitit.core.utils import DelayedSubmission, JobPaths

from vime.config.compose import ROOT
from vime.errors import UserError
from vime.launch.checks import check_ready
from vime.launch.submit import new_run
from vime.launch.sweep.file import Sweep
from vime.launch.sweep.members import Alive, Member, members, plan_member
from vime.run.files import write_atomic
from vime.slurm.executor import ENDLESS, JOB_FILE, newest_job, sbatch
from vime.slurm.scheduler import ask, batch_log
from vime.slurm.script import batch_command, sbatch_text
from vime.supervise.guardian import Guard

SCRIPT = "sbatch/sweep.sbatch"
LAYOUT = "launch.layout=partitioned"
"""Slurm has no arrays of heterogeneous jobs."""
VENV = "VIME_VENV"


def array_tasks(found: Sequence[Member], limit: int | None) -> str:
    """The value of --array that runs every combination, at most `limit` at once."""
    return f"0-{len(found) - 1}" + (f"%{limit}" if limit else "")


def array_command(found: Sequence[Member], tasks: str, arguments: Sequence[str], script: str = SCRIPT) -> list[str]:
    """The sbatch command that runs the sweep as an array: the size of the largest combination for every task."""
    member = max(found, key=lambda member: member.plan.nodes)
    text = sbatch_text(member.config, member.plan, run_dir=member.config.run.root / "x", command=["true"])
    # What sweep.sbatch says itself, and what an array has of its own.
    left_out = ("job-name", "comment", "output", "open-mode", "chdir", "no-requeue", "requeue")
    options = [
        shlex.split(match[1])[0]
        for match in re.finditer(r"^#SBATCH (--([a-z-]+)\S*.*)$", text, re.MULTILINE)
        if match[2] not in left_out
    ]
    if os.environ.get(VENV):
        options = [re.sub("^--export=(NIL$)?", f"--export={VENV},", option).rstrip(",") for option in options]
    return ["sbatch", f"--array={tasks}", *options, script, *arguments]


def prepare_task(sweep: Sweep, index: int, environ: Mapping[str, str], arguments: Sequence[str] = ()) -> Path | None:
    """Make the run of one task of an array, in the task's allocation; the script that runs it.

    None where there is nothing to run, of which the reason is printed to stderr: the combination is completed, or the
    allocation is too small and the array is submitted again with `arguments`. A task that SLURM has started again gets
    the run that it had. Raises UserError for an index that the sweep does not have, and for an allocation that is too
    small where nothing can be done about it.
    """
    if not 0 <= index < len(sweep.combinations):
        raise UserError(
            f"task {index}: the sweep has {len(sweep.combinations)} combinations; use --array=0-"
            f"{len(sweep.combinations) - 1}"
        )
    member = plan_member(sweep, sweep.combinations[index], (LAYOUT,), Alive())
    job = environ.get("SLURM_JOB_ID", "")
    lacking = _lacking(member, index, environ)
    run = member.slot.run
    if run is not None and member.slot.state != "completed" and newest_job(run) == job and not lacking:
        return run.submission
    first = environ.get("SLURM_ARRAY_TASK_MIN") == str(index)
    # The first task submits the array again for the others too, also where its own combination is done.
    others = lacking and first and any(other.due for other in members(sweep, LAYOUT))
    if not member.due and not others:
        print(f"combination {index} is completed, or goes on in another job", file=sys.stderr)
        return None
    if lacking:
        _submit_again(sweep, index, lacking, environ, arguments)
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


def _lacking(member: Member, index: int, environ: Mapping[str, str]) -> str:
    """Why an allocation will not do; empty when it will."""
    nodes = int(environ.get("SLURM_JOB_NUM_NODES", "0"))
    if nodes < member.plan.nodes:
        return f"combination {index} needs an allocation of {member.plan.nodes} nodes, this one has {nodes}"
    if "SLURM_NTASKS_PER_NODE" not in environ:
        # Nobody who took the options of the plan left this one out: GPUs, memory and the warning are not there either.
        return f"combination {index} needs an allocation with the options of its plan"
    return ""


def _submit_again(sweep: Sweep, index: int, needs: str, environ: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Replace an array whose tasks are too small by one whose tasks are not. Raises UserError where that fails."""
    found = members(sweep, LAYOUT)
    array, first = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_MIN")
    tasks = _tasks(array, environ) if array else None
    command = array_command(found, tasks or array_tasks(found, sweep.parallel), arguments)
    if array is None or tasks is None:
        raise UserError(f"{needs}; use: {shlex.join(command)}")
    if str(index) != first:
        print(f"{needs}; task {first} of this array submits it again", file=sys.stderr)
        return
    log = Path("/proc/self/fd/2").readlink()
    place = [f"--output={log.parent}/vime-sweep-%A_%a.log"] if log.is_file() else []
    try:
        again = sbatch([*place, *array_command(found, tasks, arguments, script=str(ROOT / SCRIPT))[1:]])
    except UserError as error:
        raise UserError(f"{needs}; {error}; use: {shlex.join(command)}") from None
    ask(["scancel", "--state=PENDING", array])
    print(f"{needs}; submitted again as job {again}: {shlex.join(command)}", file=sys.stderr)


def _tasks(array: str, environ: Mapping[str, str]) -> str | None:
    """The value of --array that this task's array was submitted with; None for numbers without a pattern."""
    first, last, step, count = (int(environ.get(f"SLURM_ARRAY_TASK_{n}", "0")) for n in ("MIN", "MAX", "STEP", "COUNT"))
    step = max(step, 1)
    if len(range(first, last + 1, step)) != count:
        return None
    throttle = re.search(r"ArrayTaskThrottle=(\d+)", ask(["scontrol", "show", "job", "--oneliner", array]) or "")
    limit = f"%{throttle[1]}" if throttle and throttle[1] != "0" else ""
    return f"{first}-{last}" + (f":{step}" if step > 1 else "") + limit
