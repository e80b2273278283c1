"""A run from submission to its end, by the real launcher with small scripts as roles."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.supervise.job import SCRIPTS, SERVING, SMALLEST, Job, config_in, until
from vime.errors import UserError
from vime.launch.submit import resume, submit
from vime.plan.plan import make_plan
from vime.run.directory import RunDir

Start = Callable[..., Job]

FINISHING = (
    ("trainer", 0, 2, True, ["finish", "1.5"]),
    ("trainer", 1, 2, True, ["finish", "0"]),
    ("engine", 0, 1, False, ["serve"]),
    ("router", 0, 1, False, ["serve"]),
    ("generator", 0, 1, True, ["finish", "0.2"]),
)


def test_a_run_completes_when_trainers_and_generator_have_exited_0(start: Start) -> None:
    job = start(FINISHING)
    assert job.end(timeout=60) == 0, job.log()
    run, status = job.run, job.status()
    assert (status.state, status.step, status.attempt, status.failure) == ("completed", 3, 1, None)
    assert status.started is not None
    assert status.ended is not None
    assert status.started < status.ended
    assert job.log().splitlines()[-1] == str(run.path)
    assert run.path.stat().st_mode & 0o777 == 0o700
    for file in (run.config, run.plan, run.submission, run.submitit):
        assert file.exists()
    assert (run.logs / "latest" / "engine-0.log").read_text() == "engine-0 serves\n"
    events = [json.loads(line)["event"] for line in run.events.read_text().splitlines()]
    assert events == ["run_started", "stopped", "run_ended"]
    job.check_nothing_left()


def test_what_a_role_is_told(start: Start) -> None:
    job = start(FINISHING)
    job.wait_started()
    seen = job.seen()
    job.end(timeout=60)
    tokens = {role["environ"]["VIME_RUN_TOKEN"] for role in seen.values()}
    [token] = tokens
    assert len(token) >= 32
    trainer = seen["trainer-1"]["environ"]
    assert trainer["VIME_RUN_DIR"] == str(job.run.path)
    assert (trainer["VIME_RANK"], trainer["VIME_WORLD_SIZE"], trainer["VIME_ATTEMPT"]) == ("1", "2", "1")
    assert trainer["VIME_MODEL"] == str(job.root)
    assert trainer["GLOO_SOCKET_IFNAME"] == "lo"
    # The token is nowhere on the disk.
    for file in job.run.path.rglob("*"):
        if file.is_file() and file.parent.name != "seen":
            assert token.encode() not in file.read_bytes(), file


def test_a_run_that_goes_on_is_not_resumed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    job = start(SERVING, tiny=SMALLEST)
    job.wait_started()
    before = job.run.config.read_bytes()
    link = tmp_path_factory.mktemp("links") / "run"
    link.symlink_to(job.run.path)
    for path in (job.run.path, link):
        with pytest.raises(UserError, match="still goes on"):
            resume(path, ["run.seed=7"], wait=False, supervisor=(sys.executable, str(SCRIPTS / "supervisor.py")))
    assert (job.run.config.read_bytes(), job.status().attempt) == (before, 1)
    job.launcher.terminate()
    job.end(timeout=30)


def test_an_engine_that_exits_42_through_a_pipe_while_the_trainer_waits(start: Start) -> None:
    roles = (
        ("trainer", 0, 1, True, ["serve"]),
        ("engine", 0, 1, False, ["pipe", "1", "42"]),
        ("generator", 0, 1, True, ["serve"]),
    )
    job = start(roles)
    job.wait_started()
    began = time.monotonic()
    assert job.end(timeout=10) == 1
    assert time.monotonic() - began < 8
    failure = job.status().failure
    assert failure is not None
    assert (failure.role, failure.rank, failure.exit_code, failure.signal) == ("engine", 0, 42, None)
    assert failure.tail == ["broken engine"]
    job.check_nothing_left()


def test_a_server_that_exits_0_early_is_a_failure_and_the_tail_has_40_lines(start: Start) -> None:
    roles = (("trainer", 0, 1, True, ["serve"]), ("router", 0, 1, False, ["finish", "0.2"]))
    job = start(roles)
    assert job.end(timeout=60) == 1
    failure = job.status().failure
    assert failure is not None
    assert (failure.role, failure.exit_code) == ("router", 0)
    assert failure.tail == [f"line {n}" for n in range(20, 60)]
    assert Path(failure.log).read_text().startswith("line 0\n")
    job.check_nothing_left()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_waits_cancels_the_run_when_it_is_interrupted(start: Start, signum: signal.Signals) -> None:
    job = start(SERVING)
    job.wait_started()
    os.killpg(job.launcher.pid, signum)
    assert job.end(timeout=60) == 1
    status = job.status()
    assert (status.state, status.failure) == ("cancelled", None)
    assert status.ended is not None
    job.check_nothing_left()


@pytest.mark.parametrize(("signum", "state"), [(signal.SIGTERM, "cancelled"), (signal.SIGUSR2, "timeout")])
def test_the_guardian_forwards_signals(start: Start, signum: signal.Signals, state: str) -> None:
    job = start(SERVING, overrides=["cluster.save_timeout=1"])
    job.wait_started()
    os.kill(job.pid_of("submitit.core._submit"), signum)
    assert job.end(timeout=60) == 1
    assert job.status().state == state
    job.check_nothing_left()


def test_without_waiting_the_launcher_returns_and_the_run_goes_on(start: Start) -> None:
    job = start(SERVING, "--no-wait")
    assert job.end(timeout=30) == 0
    assert job.log().splitlines() == [str(job.run.path)]
    job.wait_started()
    assert job.status().state == "running"
    os.kill(job.pid_of("submitit.local._local"), signal.SIGTERM)
    until(lambda: job.status().state == "cancelled", 10, "the run's end")
    until(lambda: not job.processes(), 5, "no process")


def test_two_runs_started_in_one_second_have_two_directories(tmp_path: Path) -> None:
    first, second = (RunDir.create(tmp_path, None, "tiny") for _ in range(2))
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700


def test_a_name_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.name=taken")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match=r"run\.name=taken: .*taken exists already"):
        submit(config, make_plan(config), wait=False)
    assert list((tmp_path / "taken").iterdir()) == []


def test_a_submission_from_inside_another_job_is_the_same(start: Start) -> None:
    enclosing = {
        "SLURM_JOB_ID": "77",
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "9",
        "SLURM_MEM_PER_NODE": "1",
        "PMI_RANK": "1",
        "SUBMITIT_EXECUTOR": "slurm",
        "SUBMITIT_LOCAL_NTASKS": "3",
        "VIME_RANK": "8",
        "VIME_RUN_TOKEN": "another run's",
        "VIME_CACHE": "/somewhere",
        "MASTER_ADDR": "elsewhere",
    }
    plain, nested = start(FINISHING), start(FINISHING, environ=enclosing)
    assert plain.end(timeout=90) == 0, plain.log()
    assert nested.end(timeout=90) == 0, nested.log()
    submissions = [job.run.submission.read_text().replace(str(job.run.path), "RUN") for job in (plain, nested)]
    assert submissions[0] == submissions[1]
    environ = nested.seen()["trainer-0"]["environ"]
    assert not [name for name in environ if name.startswith(("SLURM_", "PMI_"))]
    assert environ["VIME_RANK"] == "0"
    assert environ["VIME_RUN_TOKEN"] != "another run's"
    assert environ["VIME_CACHE"] == "/somewhere"
    assert "MASTER_ADDR" not in environ
