"""The initial policy that a nested run makes, by the real launcher with small scripts as roles."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.supervise.job import SMALLEST, Job, until
from vime.config.compose import compose
from vime.run.directory import RunDir

Start = Callable[..., Job]
STEPS = str(compose("local", "tiny_sft").training.steps)
MAIN = (
    ("trainer", 0, 1, True, ["finish", "0.2"]),
    ("engine", 0, 1, False, ["serve"]),
    ("generator", 0, 1, True, ["finish", "0.2"]),
)
WARMUP = (("trainer", 0, 1, True, ["export", STEPS]), ("generator", 0, 1, True, ["finish", "0"]))


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """What starts a job with an empty cache."""
    return {"environ": {"VIME_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}}


def test_two_runs_at_once_warm_up_one_model(start: Start, options: dict[str, Any]) -> None:
    jobs = [start(MAIN, warmup=WARMUP, **options) for _ in range(2)]
    for job in jobs:
        assert job.end(timeout=120) == 0, job.log()
    models = {Path(job.seen()["trainer-0"]["environ"]["VIME_MODEL"]) for job in jobs}
    [model] = models
    # The warm-up started from the tiny model, whose folder it wrote into its export here.
    tiny = Path((model / "weights").read_text())
    assert (tiny / "model.safetensors").exists()
    assert tiny.parent == model.parent
    warmups = [RunDir(job.run.path / "warmup") for job in jobs if (job.run.path / "warmup").exists()]
    assert [run.read_status().state for run in warmups] == ["completed"]
    for job in jobs:
        job.check_nothing_left()


def test_a_warmup_that_fails_is_the_failure_of_the_run(start: Start, options: dict[str, Any]) -> None:
    warmup = (("trainer", 0, 1, True, ["fail", "0.1", "3"]), ("generator", 0, 1, True, ["serve"]))
    job = start(MAIN, warmup=warmup, **options)
    assert job.end(timeout=120) == 1
    status = job.status()
    assert status.state == "failed"
    assert status.failure is not None
    assert (status.failure.role, status.failure.exit_code) == ("trainer", 3)
    assert status.failure.log == str(job.run.path / "warmup" / "logs" / "attempt_1" / "trainer-0.log")
    assert job.seen() == {}, "no role of the run itself starts"
    job.check_nothing_left()


@pytest.mark.parametrize(
    ("part", "signum", "state"),
    [("submitit.local._local", signal.SIGTERM, "cancelled"), ("scripts/supervisor.py", signal.SIGKILL, "failed")],
)
def test_a_run_that_is_stopped_while_it_warms_up(
    start: Start, options: dict[str, Any], part: str, signum: signal.Signals, state: str
) -> None:
    warmup = (("trainer", 0, 1, True, ["serve"]), ("generator", 0, 1, True, ["serve"]))
    job = start(MAIN, warmup=warmup, **options)
    nested = RunDir(job.run.path / "warmup")
    until(lambda: len(list(nested.path.glob("seen/*"))) == 2, 90, "the roles of the warm-up")
    os.kill(job.pid_of(part), signum)
    assert job.end(timeout=15) == 1
    assert job.status().state == state
    assert nested.read_status().state == state
    job.check_nothing_left()


def test_a_tiny_model_without_a_warmup_is_made_once(start: Start, options: dict[str, Any]) -> None:
    models = set()
    for _ in range(2):
        job = start(MAIN, tiny=SMALLEST, **options)
        assert job.end(timeout=60) == 0, job.log()
        models.add(job.seen()["trainer-0"]["environ"]["VIME_MODEL"])
    [model] = models
    assert (Path(model) / "config.json").exists()
