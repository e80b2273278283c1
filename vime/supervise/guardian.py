"""The guardian: what submitit runs. It starts the supervisor and says the last word if the supervisor cannot.

    launcher ── submitit's controller ── guardian ── supervisor ── roles

Every process of that chain may be killed. The kernel tells a child of its parent's end: roles are killed with the
supervisor; the supervisor gets TERM with the guardian and tears down; the guardian is killed with submitit's process.
In the other direction each parent sees its child's end. Orphans fall to the supervisor, then to the guardian, and are
killed there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from submitit.core.utils import DelayedSubmission, UncompletedJobError

from vime.errors import UserError
from vime.plan.plan import MOVED
from vime.run.directory import Failure, RunDir, Status, utc_now
from vime.run.role import become_subreaper, die_with_parent
from vime.slurm.scheduler import exclude_nodes, job_states, requeue_ending
from vime.supervise.failure import launcher_failure, with_disk
from vime.supervise.lifecycle import begin_attempt, no_progress, refused_nodes
from vime.supervise.process_tree import kill_descendants, reap_orphans
from vime.supervise.processes import KILL_TIMEOUT, signal_name
from vime.supervise.stop_signals import WATCHED

SUPERVISOR = (sys.executable, "-m", "vime.supervise.supervisor")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
EXCLUDE_TRIES = 10
TRIES = 3
"""Questions and requests to a controller that may be busy, RETRY_SECONDS apart."""
RETRY_SECONDS = 2.0


class RunEnded(Exception):
    """The run did not complete. submitit turns it into a job that exits non-zero."""


@dataclass(frozen=True)
class Guard:
    """What submitit pickles and calls. `checkpoint` makes it one that submitit requeues."""

    supervisor: tuple[str, ...] = SUPERVISOR

    def __call__(self, run_path: str) -> str:
        """See `guard`."""
        return guard(run_path, self.supervisor)

    def checkpoint(self, run_path: str) -> DelayedSubmission:
        """The same again: what has been done is in the run's folder, and which attempt it is too."""
        return DelayedSubmission(self, run_path)


def guard(run_path: str, supervisor: Sequence[str] = SUPERVISOR) -> str:
    """Run the supervisor of the run in `run_path` to its end and make sure that the status is true and nothing is left.

    Returns "completed"; raises RunEnded with the state and the failing role otherwise. A run that asks to be continued
    is requeued by submitit, and this process ends.
    """
    # submitit's handler for USR2 saves the call and requeues the job. Here the signal first lets the run save.
    requeue = signal.getsignal(signal.SIGUSR2)
    become_subreaper()
    # submitit names the job by its process, so that one that has ended already is noticed too.
    controller = os.environ.get("SUBMITIT_LOCAL_JOB_ID")
    die_with_parent(int(controller) if controller else None)
    run = RunDir(Path(run_path))
    status = begin_attempt(run)
    if status.state == "completed":
        return status.state
    log = run.log("supervisor", 0, status.attempt)
    hopeless = no_progress(run)
    if hopeless:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{hopeless}\n")
        close(run, launcher_failure("supervisor", log), status.attempt)
        raise RunEnded(f"{run.path}: {hopeless}")
    child = _start(run, [MOVED.get(word, word) for word in supervisor], log)
    code = child.wait()
    kill_descendants(os.getpid(), KILL_TIMEOUT)
    reap_orphans(frozenset())
    if run.read_status().attempt != status.attempt:
        raise RunEnded(f"{run.path}: a later attempt than {status.attempt} has begun elsewhere")
    failure = launcher_failure("supervisor", log, code if code >= 0 else None, signal_name(-code) if code < 0 else None)
    close(RunDir(run.path / "warmup"), failure)
    status = close(run, failure, status.attempt)
    job = os.environ.get("SLURM_JOB_ID")
    if status.state == "requeued" and job and callable(requeue):
        # A job that does not run any more is ended by SLURM, which may have requeued it already.
        running = _state_of(job) == "RUNNING"
        problem = _requeue(requeue, job, run) if running else requeue_ending(job)
        if problem:
            with log.open("a") as output:
                output.write(f"the job could not be requeued: {problem}\n")
            run.write_status(replace(status, state="running"))
            status = close(run, launcher_failure("guardian", log), status.attempt)
    if status.state != "completed":
        raise RunEnded(f"{run.path} {status.state}" + (f": {status.failure.role}" if status.failure else ""))
    return status.state


def _state_of(job: str) -> str | None:
    """The state of this process's own job; asked again when a busy controller does not answer."""
    for _ in range(TRIES):
        state = job_states([job]).get(job)
        if state is not None:
            return state
        time.sleep(RETRY_SECONDS)
    return None


def _requeue(requeue: Callable[[int, None], object], job: str, run: RunDir) -> str:
    """Let submitit requeue the job, which ends this process. Returns why that failed, TRIES times."""
    problem = ""
    for _ in range(TRIES):
        try:
            requeue(signal.SIGUSR2, None)
        except SystemExit:
            _avoid(job, refused_nodes(run))
            raise
        except (OSError, subprocess.SubprocessError, UncompletedJobError) as error:
            problem = str(error)
            time.sleep(RETRY_SECONDS)
    return problem


def _avoid(job: str, nodes: Sequence[str]) -> None:
    """Keep the requeued job away from refused nodes. SLURM ends this process soon, and its questions before it."""
    for _ in range(EXCLUDE_TRIES if nodes else 0):
        if exclude_nodes(job, nodes):
            return
        time.sleep(0.5)


def close(run: RunDir, failure: Failure, attempt: int | None = None) -> Status:
    """Record that a run whose processes are gone has failed, unless its status already says how it ended.

    attempt: the one whose processes are gone; a later one is not ended with it. None: whichever there is. A failure
    that was recorded before is kept: it came first. Returns the status that holds now.
    """
    try:
        status = run.read_status()
    except UserError:
        status = Status(state="pending")
    later = attempt is not None and status.attempt != attempt
    if later or status.terminal or status.state == "requeued" or not run.path.exists():
        return status
    failure = status.failure or with_disk(failure, run)
    closed = replace(status, state="failed", ended=utc_now(), failure=failure)
    try:
        run.write_status(closed)
    except OSError as error:
        print(f"{run.status} cannot be written: {error.strerror}; the run has failed", file=sys.stderr, flush=True)
    return closed


def _start(run: RunDir, supervisor: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    guardian = os.getpid()

    def forward(signum: int, frame: FrameType | None) -> None:
        child.send_signal(signum)

    # Blocked until the handlers have a child to forward to. The supervisor inherits the mask and keeps it: it fetches
    # these signals when it is ready, so none is lost and none ends it half-way.
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            [*supervisor, str(run.path), str(guardian)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(guardian, signal.SIGTERM),
        )
    for signum in _FORWARDED:
        signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    return child
