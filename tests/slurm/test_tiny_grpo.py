"""The main job on a real Slurm with its real parts: two trainer nodes and one rollout node."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process_table import processes
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import Clusters
from tests.slurm.shape import SMALL
from tests.supervise.job import until
from vime.config.compose import ROOT
from vime.run.directory import RunDir

pytestmark = pytest.mark.slow
LONGEST = 900


START = ("cluster=minislurm", "recipe=tiny_grpo", "run.name=run", "--wait")
STEPS = 16
COMPARED = (f"training.steps={STEPS}", "training.save_interval=2", "training.adam_eps=1e-4", "evaluation.prompts=0")
SMALL_STEPS = "rollout.prompts_per_step=8"
Launch = Callable[..., tuple[subprocess.Popen[str], RunDir]]


@contextmanager
def _launching(slurm: SlurmCluster, folder: Path, cache: Path) -> Iterator[Launch]:
    """Starts launch.py for the run `run` in `folder`; in the end interrupts what still waits for it."""
    launchers: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> tuple[subprocess.Popen[str], RunDir]:
        place = [] if "--resume" in arguments else [f"run.root={folder}"]
        launcher = subprocess.Popen(
            [sys.executable, "launch.py", *arguments, *place],
            cwd=ROOT,
            env={**slurm.environ, "VIME_CACHE": str(cache)},
            stdout=(folder / "launcher.log").open("a"),
            stderr=subprocess.STDOUT,
            text=True,
        )
        launchers.append(launcher)
        return launcher, RunDir(folder / "run")

    yield begin
    for launcher in launchers:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(120)


@pytest.fixture
def launch(slurm: SlurmCluster, tmp_path: Path, model_cache: Path) -> Iterator[Launch]:
    with _launching(slurm, tmp_path, model_cache) as begin:
        yield begin


@pytest.fixture(scope="module")
def whole(slurm_clusters: Clusters, tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[RunDir]:
    """A run that nothing interrupts, on slices of one allocation."""
    folder = tmp_path_factory.mktemp("whole")
    with _launching(slurm_clusters(SMALL), folder, model_cache) as begin:
        launcher, run = begin(*START, "launch.layout=partitioned", *COMPARED, SMALL_STEPS)
        assert launcher.wait(LONGEST) == 0, (folder / "launcher.log").read_text()
        yield run


def _steps(run: RunDir) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_tiny_grpo_completes_on_slices_of_one_allocation(whole: RunDir) -> None:
    assert [step["step"] for step in _steps(whole)] == list(range(1, STEPS + 1))
    # Trainer and engine are on different nodes of the plan and still agree about every logprob.
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in _steps(whole))
    assert (whole.export / f"step_{STEPS}" / "config.json").exists()
    assert (whole.path.parent / "launcher.log").read_text().splitlines()[-1] == str(whole.path)


def test_a_heterogeneous_job_that_is_killed_resumed_and_warned_equals_an_uninterrupted_one(
    whole: RunDir, launch: Launch, slurm: SlurmCluster, tmp_path: Path
) -> None:
    launcher, run = launch(*START, *COMPARED, SMALL_STEPS)
    until(lambda: run.status.exists() and run.read_status().step >= 3, LONGEST, "step 3")
    log = (run.logs / "latest" / "supervisor-0.log").read_text()
    [pid] = re.findall(r"started trainer-1: pid (\d+) on train1", log)
    os.kill(int(pid), signal.SIGKILL)
    until(lambda: run.read_status().failure is not None, 10, "the failure")
    assert launcher.wait(90) == 1
    failure = run.read_status().failure
    assert failure is not None
    assert (run.read_status().state, failure.role, failure.node) == ("failed", "trainer", "train1")
    until(lambda: not _pids(run), 15, "no process of the run on any node")

    # By hand it goes on from its newest checkpoint.
    launcher, _ = launch("--resume", str(run.path), "--wait")
    until(lambda: run.read_status().attempt == 2 and run.read_status().step >= 7, LONGEST, "step 7")
    job = (run.submitit / "job_id").read_text().strip()
    slurm.run("scancel", "--batch", "--signal=USR2", job)
    until(lambda: run.read_status().state == "requeued", 120, "the request to save to be met")
    reached = max(step["step"] for step in _steps(run))
    assert (run.checkpoints / f"step_{reached}" / "complete").exists(), "told in time, it saves the step it is in"
    # By itself it goes on as the same job.
    assert launcher.wait(LONGEST) == 0, (tmp_path / "launcher.log").read_text()
    assert (run.read_status().state, run.read_status().attempt) == ("completed", 3)
    loaded = [event["step"] for event in _events(run) if event["event"] == "checkpoint_loaded" and event["rank"] == 0]
    assert loaded[0] % 2 == 0
    assert loaded[1] == reached
    last = {step["step"]: step for step in _steps(run)}  # a step that was lost is trained again
    attempts = [last[step]["attempt"] for step in range(1, STEPS + 1)]
    assert attempts == [1] * loaded[0] + [2] * (reached - loaded[0]) + [3] * (STEPS - reached)
    # The same prompts in the same order, the same samples and losses, also of the steps that were lost.
    expected = {step["step"]: step for step in _steps(whole)}
    for step in _steps(run):
        for name, value in expected[step["step"]].items():
            if name == "rollout/wait_time_ratio":
                continue
            # What a step measured of groups that an earlier attempt generated is not there.
            if name.startswith("train/") or (name.startswith("rollout/") and name in step):
                assert step[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (step["attempt"], step["step"], name)
    ends = [json.loads((r.checkpoints / f"step_{STEPS}" / "complete").read_bytes()) for r in (run, whole)]
    assert ends[0]["cursor"] == ends[1]["cursor"]
    assert all(step["train/grad_norm"] > 1e-3 for step in expected.values())  # there was something to lose


def _pids(run: RunDir, *words: str) -> list[int]:
    """Live processes of the run whose command line holds all of `words`."""
    own = str(run.path)
    return list(processes(lambda line, environment: own in environment + line and all(word in line for word in words)))


def test_an_engine_that_spans_nodes_restarts_whole_and_its_lost_part_is_named(launch: Launch) -> None:
    """Tensor parallel over two nodes of one slot each: both hold half of the weights, and neither serves alone."""
    placed = ["training.ranks=1", "rollout.tensor_parallel=2", "cluster.slurm.rollout.partition=all"]
    small = ["training.steps=10000", "evaluation.prompts=0", SMALL_STEPS, "rollout.max_restarts=1"]
    launcher, run = launch(*START, *placed, *small)

    def kill_rank_of(node: str) -> None:
        """The vLLM rank on `node`, found by the executor above it."""
        [executor] = [pid for pid in _pids(run, "vime.rollout.engine.headless") if _node(pid) == node]
        [rank] = [process for process in psutil.Process(executor).children() if "Worker" in process.name()]
        rank.kill()

    until(lambda: run.status.exists() and run.read_status().step >= 2, LONGEST, "step 2")
    [begun] = [event for event in _events(run) if event["event"] == "run_started"]
    assert (begun["hosts"]["trainer"], len(begun["hosts"]["rollout"])) == (["train0"], 2)
    second = begun["hosts"]["rollout"][1]
    kill_rank_of(second)
    until(lambda: "restarted" in {event["event"] for event in _events(run)}, 30, "the engine to end")
    at = run.read_status().step
    until(lambda: run.read_status().step >= at + 3, LONGEST, "three steps after the restart")
    kill_rank_of(second)
    until(lambda: run.read_status().failure is not None, 10, "the failure")
    assert launcher.wait(90) == 1
    # The trainer's logprobs stayed those of both halves, before and after.
    steps = _steps(run)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in steps)
    [restarted] = [event for event in _events(run) if event["event"] == "restarted"]
    assert (restarted["engine"], restarted["part"], restarted["rank"]) == (0, 1, 0)
    failure = run.read_status().failure
    assert failure is not None
    assert (failure.role, failure.rank, failure.node, failure.exit_code) == ("engine", 1, second, 1)
    assert failure.tail[-1] == "vLLM ended with 1; rollout.max_restarts=1 are used up"
    until(lambda: not _pids(run), 15, "no process of the run on any node")


def _events(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events.read_text().splitlines()]


def _node(pid: int) -> str:
    return psutil.Process(pid).environ().get("VIME_NODE", "")
