"""As test_kill.py, with the real roles: Megatron ranks, vLLM with its own processes, the router, the generator."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.supervise.job import Job, until
from vime.config.compose import compose

Start = Callable[..., Job]
STEPS = 100_000
"""More than the test lets it reach."""


def _running(start: Start) -> Job:
    tiny = compose("local", "tiny_grpo").model.tiny
    job = start((), "--real", tiny=tiny, overrides=[f"training.steps={STEPS}", "evaluation.prompts=0"])
    until(lambda: job.launcher.poll() is not None or job.status().step >= 1, 400, "the first step")
    assert job.status().state == "running", job.log()
    return job


def _pids(job: Job) -> dict[str, int]:
    """The pid of each role, from the supervisor's log."""
    log = (job.run.logs / "latest" / "supervisor-0.log").read_text()
    return {name: int(pid) for name, pid in re.findall(r"started (\S+): pid (\d+)", log)}


def _listening(pids: set[int]) -> set[int]:
    """The TCP ports on which processes of `pids` listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
            if found:
                inodes.add(found[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


# The engine, which leaves the most behind, and the supervisor, after which nobody ends the others; test_kill.py kills
# every role, and tests/slurm a real trainer.
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine-0", "supervisor-0"])
def test_a_killed_role_ends_the_run_within_10_seconds_and_leaves_nothing(start: Start, victim: str) -> None:
    job = _running(start)
    ports = _listening(set(job.processes()))
    assert len(ports) >= 3, "the store, an engine and the router listen"
    pids = {**_pids(job), "supervisor-0": job.pid_of("vime.supervise.supervisor")}
    began = time.monotonic()
    job.kill(pids[victim])
    assert job.end(timeout=10) == 1
    print(f"{victim}: {time.monotonic() - began:.1f} s")
    status = job.status()
    assert status.state == "failed"
    assert status.failure is not None
    assert (f"{status.failure.role}-{status.failure.rank}", status.failure.signal) == (victim, "SIGKILL")
    job.check_nothing_left(ports)
