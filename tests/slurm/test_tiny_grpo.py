"""The main job on a real Slurm with its real parts: two trainer nodes and one rollout node."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.job import until
from tests.slurm.cluster import SlurmCluster
from vime.compose import ROOT
from vime.run_dir import RunDir

pytestmark = pytest.mark.slow
LONGEST = 900


START = ("cluster=minislurm", "recipe=tiny_grpo", "run.name=run", "--wait")
Launch = Callable[..., tuple[subprocess.Popen[str], RunDir]]


@pytest.fixture
def launch(slurm: SlurmCluster, tmp_path: Path, model_cache: Path) -> Iterator[Launch]:
    """Starts launch.py for the run `run`, and, after the test, interrupts what still waits for it."""
    launchers: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> tuple[subprocess.Popen[str], RunDir]:
        place = [] if "--resume" in arguments else [f"run.root={tmp_path}"]
        launcher = subprocess.Popen(
            [sys.executable, "launch.py", *arguments, *place],
            cwd=ROOT,
            env={**slurm.environ, "VIME_CACHE": str(model_cache)},
            stdout=(tmp_path / "launcher.log").open("a"),
            stderr=subprocess.STDOUT,
            text=True,
        )
        launchers.append(launcher)
        return launcher, RunDir(tmp_path / "run")

    yield begin
    for launcher in launchers:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(120)


def _steps(run: RunDir) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_tiny_grpo_completes_on_slices_of_one_allocation(launch: Launch, tmp_path: Path) -> None:
    small = ["training.steps=2", "evaluation.prompts=16", "rollout.prompts_per_step=8"]
    launcher, run = launch(*START, "launch.layout=partitioned", *small)
    assert launcher.wait(LONGEST) == 0, (tmp_path / "launcher.log").read_text()
    assert [step["step"] for step in _steps(run)] == [1, 2]
    # Trainer and engine are on different nodes of the plan and still agree about every logprob.
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in _steps(run))
    assert (run.export / "step_2" / "config.json").exists()
    assert (tmp_path / "launcher.log").read_text().splitlines()[-1] == str(run.path)


def test_a_heterogeneous_job_that_is_killed_resumed_and_warned_completes(
    launch: Launch, slurm: SlurmCluster, tmp_path: Path
) -> None:
    small = ["training.steps=16", "training.save_interval=2", "evaluation.prompts=0", "rollout.prompts_per_step=8"]
    launcher, run = launch(*START, *small)
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
    assert list(last) == list(range(1, 17))
    attempts = [last[step]["attempt"] for step in range(1, 17)]
    assert attempts == [1] * loaded[0] + [2] * (reached - loaded[0]) + [3] * (16 - reached)
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in _steps(run))


def _pids(run: RunDir, *parts: str) -> list[int]:
    """Live processes of the run whose command line holds all of `parts`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
                mine = str(run.path).encode() in (entry / "environ").read_bytes() or str(run.path) in line
            except OSError:
                continue
            if mine and all(part in line for part in parts):
                found.append(int(entry.name))
    return found


def test_an_engine_that_spans_nodes_restarts_whole_and_its_lost_part_is_named(launch: Launch) -> None:
    """Tensor parallel over two nodes of one slot each: both hold half of the weights, and neither serves alone."""
    placed = ["training.ranks=1", "rollout.tensor_parallel=2", "cluster.slurm.rollout.partition=all"]
    small = ["training.steps=10000", "evaluation.prompts=0", "rollout.prompts_per_step=8", "rollout.max_restarts=1"]
    launcher, run = launch(*START, *placed, *small)

    def kill_rank_of(node: str) -> None:
        """The vLLM rank on `node`, found by the executor above it."""
        [executor] = [pid for pid in _pids(run, "vime.rollout.headless") if _node(pid) == node]
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
