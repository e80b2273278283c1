"""What SLURM says of a job: its state, and why it ends one. Every question is bounded, and no answer is no answer."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vime.run.directory import RunDir, State
from vime.slurm.environment import submission_environment

ASK_TIMEOUT = 20.0
NOTICE_TIME = 2.0
"""Seconds that SLURM's notice of why it ends a job may take to show in the batch step's output."""
COMPLETING_TIME = 10.0
"""Seconds that a job without a notice may take to leave the state COMPLETING."""
ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)
"""States of a job that will not run again."""
_NOTICE = re.compile(r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+(?: DUE TO (?P<why>.+?))? \*\*\*")


def ask(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str | None:
    """What a command of SLURM prints; None when it fails or takes over ASK_TIMEOUT seconds."""
    try:
        done = subprocess.run(
            list(command),
            env=submission_environment(os.environ if environ is None else environ),
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def job_states(job_ids: Sequence[str], accounting: bool = False) -> dict[str, str]:
    """Job id -> state, such as RUNNING, for the jobs that SLURM knows. Of a heterogeneous job the leader's.

    squeue knows jobs until a few minutes after their end, sacct for ever where there is accounting.
    """
    if not job_ids:
        return {}
    found = {}
    if len(job_ids) == 1:
        text = ask(["scontrol", "show", "job", "--oneliner", job_ids[0]])
        match = re.search(r"JobState=(\w+)", text or "")
        if match:
            found[job_ids[0]] = match[1]
    else:
        # One question however many they are: a look at a sweep must not weigh on the controller.
        rows = ask(["squeue", "--me", "-h", "--states=all", "-o", "%A %T"]) or ""
        states = dict(row.split() for row in rows.splitlines() if len(row.split()) == 2)
        found = {job: states[job] for job in job_ids if job in states}
    unknown = [job for job in job_ids if job not in found]
    if unknown and accounting:
        rows = ask(["sacct", "-n", "-X", "-P", "-o", "JobID,State", "-j", ",".join(unknown)]) or ""
        found.update(read_sacct(rows))
    return found


def in_queue(job_id: str) -> bool | None:
    """Whether a job of this user waits, runs or is ending; None when SLURM does not answer."""
    listed = ask(["squeue", "-h", "--me", "-o", "%i"])
    return None if listed is None else job_id in {re.split(r"[+_.]", row)[0] for row in listed.split()}


def read_sacct(rows: str) -> dict[str, str]:
    """Job id -> state of `JobID|State` rows. The row `123+0` is the leader of the heterogeneous job 123."""
    states = {}
    for row in rows.splitlines():
        name, _, state = row.partition("|")
        leader, plus, component = name.partition("+")
        if "." not in name and state and (not plus or component == "0"):
            states[leader] = state.split()[0]  # "CANCELLED by 1000"
    return states


def batch_log(run: RunDir, job_id: str) -> Path:
    """Where the batch step of a job writes, unless it is a task of an array."""
    return run.submitit / f"{job_id}_0_log.out"


def output_of(pid: int) -> list[Path]:
    """The file that process `pid` prints into, when it is one. A batch step's holds SLURM's notices, wherever it is."""
    try:
        path = Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:
        return []
    return [path] if path.is_file() else []


def job_fate(job_id: str, *logs: Path) -> State:
    """Why SLURM ends the job whose batch step wrote one of `logs`: cancelled, timeout, or requeued.

    While it ends, its state is COMPLETING whatever the reason; the reason is in slurmstepd's notice. Where that cannot
    be written, because the node's own slurmd is gone, a job that waits again was requeued.
    """
    deadline = time.monotonic() + NOTICE_TIME
    while time.monotonic() < deadline:
        notices = [notice for log in logs for notice in _notices(log)]
        if notices:
            return read_notice(notices[-1]["why"] or "")
        time.sleep(0.1)
    deadline = time.monotonic() + COMPLETING_TIME
    while (state := job_states([job_id]).get(job_id)) == "COMPLETING" and time.monotonic() < deadline:
        time.sleep(0.5)
    return "requeued" if state in ("PENDING", "REQUEUED") else "cancelled"


def _notices(log: Path) -> list[re.Match[str]]:
    try:
        return list(_NOTICE.finditer(log.read_text(errors="replace")))
    except OSError:
        return []


def read_notice(why: str) -> State:
    """The state after a notice `... CANCELLED AT <time> DUE TO <why>`."""
    if "TIME LIMIT" in why:
        return "timeout"
    if any(word in why for word in ("REQUEUE", "PREEMPTION", "NODE FAIL")):
        return "requeued"
    return "cancelled"


def requeue_ending(job_id: str) -> str:
    """See to it that a job that SLURM is ending, for another or for a lost node, is started again.

    SLURM does so itself, but not where the site has PreemptMode=CANCEL. Returns why it will not start again; empty when
    it will.
    """
    environ = submission_environment(os.environ)
    command = ["scontrol", "requeue", job_id]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=ASK_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    words = (done.stderr or done.stdout).strip()
    # "Job is pending execution": SLURM was first.
    return "" if done.returncode == 0 or "pending" in words else words


def exclude_nodes(job_id: str, nodes: Sequence[str]) -> bool:
    """Keep a pending job (all components) away from `nodes` too. Returns whether SLURM accepted it.

    An update replaces the list that a job has: what is in it already, such as the site's own, is said again.
    """
    rows = (ask(["squeue", "-h", "-j", job_id, "-o", "%A %x"]) or job_id).splitlines()
    done = []
    for component, _, excluded in (row.strip().partition(" ") for row in rows):
        there = [] if excluded in ("", "(null)") else [excluded]
        done.append(ask(["scontrol", "update", f"JobId={component}", f"ExcNodeList={','.join([*there, *nodes])}"]))
    return bool(done) and all(answer is not None for answer in done)
