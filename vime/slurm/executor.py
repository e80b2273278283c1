"""submitit's SLURM executor for one run in either layout, and the state of its job.

submitit keeps the pickled call, its folder, its result and the requeueing. Its sbatch text knows no heterogeneous jobs,
sends the warning signal past the batch step and cannot say "not exclusive", so the text is `vime.slurm.script`'s.
Its watcher asks sacct alone, where the job `123` is called `123+0`, and waits for ever without accounting, so this one
asks the controller first and then the run's own files.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from submitit.core.core import InfoWatcher
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from vime.config import Config
from vime.errors import UserError
from vime.plan.plan import Plan
from vime.run.directory import RunDir, State
from vime.run.files import write_atomic
from vime.slurm.environment import submission_environment
from vime.slurm.scheduler import ASK_TIMEOUT, ask, job_states
from vime.slurm.script import sbatch_text

JOB_FILE = "job_id"
"""In the run's submitit folder: the id of its newest job."""
FIND_TRIES, FIND_INTERVAL = 6, 5.0
"""How often, and seconds apart, a job is looked for whose sbatch did not answer."""
ENDLESS = 1_000_000
"""submitit counts how often a job may time out; here the chain of attempts decides (`vime.supervise.lifecycle`)."""
_SLURM_STATE: dict[State, str] = {
    "completed": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
    "timeout": "TIMEOUT",
    "requeued": "REQUEUED",
}


class SubmissionUnknown(UserError):
    """sbatch did not answer: the controller may have the job, so that nothing of the run may be deleted."""


class Watcher(InfoWatcher):
    """Job states from the controller, from accounting where the site has it, and from the run's status.

    A state that nobody knows is UNKNOWN, which is neither failed nor done.
    """

    def __init__(self, delay_s: int = 30, accounting: bool = False) -> None:
        super().__init__(delay_s)
        self.accounting = accounting
        self.runs: dict[str, RunDir] = {}

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """SLURM's word for the state of `job_id`."""
        return str(self.get_info(job_id, mode=mode).get("State") or "UNKNOWN")

    def update(self) -> None:
        """Ask for every job that has not ended yet."""
        asked = sorted(self._registered - self._finished)
        states = job_states(asked, self.accounting)
        for job in asked:
            state = states.get(job) or self._own(job)
            if state:
                self._info_dict[job] = {"JobID": job, "State": state}
        self._num_calls += 1
        self._last_status_check = time.time()
        self._finished.update(job for job in asked if self.is_done(job, mode="cache"))

    def _own(self, job: str) -> str | None:
        run = self.runs.get(job)
        try:
            return None if run is None else _SLURM_STATE.get(run.read_status().state)
        except UserError:
            return None


class VimeJob(SlurmJob[Any]):
    """A job whose state is known without accounting too."""

    watcher = Watcher()


class VimeExecutor(SlurmExecutor):
    """Submits one run. `name()` is `vime`; it is registered in submitit's entry-point group.

    submitit reads one executor from a distribution, so the layout (hetjob or partitioned) is the plan's and not a class
    of its own.
    """

    job_class = VimeJob

    def __init__(self, run: RunDir, config: Config, plan: Plan, dependency: str | None = None) -> None:
        super().__init__(folder=run.submitit, max_num_timeout=ENDLESS, python=config.cluster.python)
        self._run, self._config, self._plan, self._dependency = run, config, plan, dependency

    @classmethod
    def affinity(cls) -> int:
        """Never chosen by submitit's AutoExecutor: it cannot give it a run."""
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        argv = shlex.split(command)
        return sbatch_text(self._config, self._plan, run_dir=self._run.path, command=argv, dependency=self._dependency)

    def _submit_command(self, command: str) -> VimeJob:
        """Write submission.sbatch and submit exactly that. Raises UserError with what sbatch says."""
        write_atomic(self._run.submission, self._make_submission_file_text(command, ""))
        try:
            job_id = sbatch([str(self._run.submission)])
        except SubmissionUnknown as error:
            job_id = _job_named(self._run.path.name) or ""
            if not job_id:
                raise SubmissionUnknown(
                    f"{error}, and the queue has no job {self._run.path.name} yet. The controller may still have it:"
                    f" {self._run.path} is kept; look with squeue --me, and delete the folder if the job never comes"
                ) from None
        write_atomic(self._run.submitit / JOB_FILE, f"{job_id}\n")
        return job_of(self._run, job_id, self._config)


def _job_named(name: str) -> str | None:
    """The id of the user's job of that name, asked for FIND_TRIES times. A run's name is that of one job."""
    for _ in range(FIND_TRIES):
        for row in (ask(["squeue", "--me", "-h", "-o", "%A %j"]) or "").splitlines():
            job, _, found = row.strip().partition(" ")
            if found == name:
                return job  # of a heterogeneous job the leader, which is listed first
        time.sleep(FIND_INTERVAL)
    return None


def sbatch(arguments: Sequence[str]) -> str:
    """sbatch as from a login shell; the id of the job, of a heterogeneous one the leader's.

    Raises UserError with sbatch's own words when it refuses, SubmissionUnknown when it does not answer.
    """
    environ = submission_environment(os.environ)
    try:
        done = subprocess.run(
            ["sbatch", *arguments], env=environ, capture_output=True, text=True, timeout=3 * ASK_TIMEOUT, check=False
        )
    except FileNotFoundError:
        raise UserError("sbatch is not installed here: submit from a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise SubmissionUnknown(f"sbatch did not answer within {3 * ASK_TIMEOUT:g} s") from None
    found = re.search(r"Submitted batch job (\d+)", done.stdout)
    if done.returncode or not found:
        raise UserError(f"sbatch refused the submission: {_one_line(done.stderr or done.stdout)}")
    return found[1]


def _one_line(text: str) -> str:
    """`invalid partition specified: x; Batch job submission failed: ...` of sbatch's several lines."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or "it gave no reason"


def job_of(run: RunDir, job_id: str, config: Config) -> VimeJob:
    """The job of a run, for questions about it."""
    VimeJob.watcher.accounting = config.cluster.slurm.accounting
    VimeJob.watcher.runs[job_id] = run
    return VimeJob(folder=run.submitit, job_id=job_id, tasks=[0])


def newest_job(run: RunDir) -> str | None:
    """The id of the job that was submitted last for a run; None for a run that never was on SLURM."""
    try:
        return (run.submitit / JOB_FILE).read_text().strip() or None
    except OSError:
        return None
