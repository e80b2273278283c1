"""Any process of a run may be killed: the run ends, the status is true, nothing is left.

With real roles: tests/test_main_job.py and tests/training/test_resume_run.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.supervise.job import SERVING, Job

Start = Callable[..., Job]


@pytest.mark.parametrize("victim", ["trainer-0", "trainer-1", "engine-0", "router-0", "generator-0"])
def test_a_killed_role_ends_the_run_and_is_named(start: Start, victim: str) -> None:
    job = start(SERVING)
    job.wait_started()
    began = time.monotonic()
    job.kill(job.seen()[victim]["pid"])
    assert job.end(timeout=10) == 1
    print(f"{victim}: {time.monotonic() - began:.1f} s")
    status = job.status()
    assert status.state == "failed"
    assert status.ended is not None
    failure = status.failure
    assert failure is not None
    assert f"{failure.role}-{failure.rank}" == victim
    assert (failure.signal, failure.exit_code) == ("SIGKILL", None)
    assert failure.tail == [f"{victim} serves"]
    job.check_nothing_left()


@pytest.mark.parametrize(
    ("process", "role", "signal"),
    [
        ("scripts/supervisor.py", "supervisor", "SIGKILL"),
        ("submitit.core._submit", "guardian", None),
        ("submitit.local._local", "guardian", None),
    ],
)
def test_a_killed_process_of_the_launcher_ends_the_run(
    start: Start, process: str, role: str, signal: str | None
) -> None:
    job = start((*SERVING[:-1], ("generator", 0, 1, True, ["daemon"])))
    job.wait_started(more=1)
    began = time.monotonic()
    job.kill(job.pid_of(process))
    assert job.end(timeout=10) == 1
    print(f"{process}: {time.monotonic() - began:.1f} s")
    status = job.status()
    assert status.state == "failed"
    assert status.failure is not None
    assert (status.failure.role, status.failure.signal) == (role, signal)
    job.check_nothing_left()


def test_supervisor_and_guardian_killed_at_once_are_recorded_by_the_launcher(start: Start) -> None:
    job = start(SERVING, overrides=["cluster.stop_timeout=0.5"])
    job.wait_started()
    supervisor, guardian = job.pid_of("scripts/supervisor.py"), job.pid_of("submitit.core._submit")
    job.kill(supervisor)
    job.kill(guardian)
    assert job.end(timeout=20) == 1
    assert job.status().state == "failed"
    job.check_nothing_left()


def test_the_role_that_was_killed_is_named_and_not_the_one_that_followed(start: Start) -> None:
    roles = (("trainer", 0, 2, True, ["follow", "trainer-1"]), *SERVING[1:])
    job = start(roles)
    job.wait_started()
    job.kill(job.seen()["trainer-1"]["pid"])
    assert job.end(timeout=10) == 1
    failure = job.status().failure
    assert failure is not None
    assert (failure.role, failure.rank, failure.signal) == ("trainer", 1, "SIGKILL")


def test_a_role_that_ignores_term_and_a_daemonised_grandchild_are_gone(start: Start) -> None:
    roles = (
        ("trainer", 0, 1, True, ["stubborn"]),
        ("engine", 0, 1, False, ["daemon"]),
        ("generator", 0, 1, True, ["serve"]),
    )
    job = start(roles, overrides=["cluster.stop_timeout=1"])
    job.wait_started(more=1)
    assert "engine-0-daemon" in job.seen()
    began = time.monotonic()
    job.kill(job.seen()["generator-0"]["pid"])
    assert job.end(timeout=10) == 1
    assert time.monotonic() - began > 1, "a role that ignores TERM has the stop timeout"
    job.check_nothing_left()
