"""The main job on a real Slurm with its real parts: two trainer nodes and one rollout node."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
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


def _launch(slurm: SlurmCluster, root: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "launch.py", *arguments],
        cwd=ROOT,
        env=slurm.environ,
        stdout=(root / "launcher.log").open("a"),
        stderr=subprocess.STDOUT,
        text=True,
    )


def _steps(run: RunDir) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.parametrize("layout", ["hetjob", "partitioned"])
def test_tiny_grpo_completes_in_both_layouts(slurm: SlurmCluster, tmp_path: Path, layout: str) -> None:
    overrides = [f"run.root={tmp_path}", "run.name=run", f"launch.layout={layout}", "training.steps=2"]
    small = ["evaluation.prompts=16", "rollout.prompts_per_step=8"]
    launcher = _launch(slurm, tmp_path, "cluster=minislurm", "recipe=tiny_grpo", "--wait", *overrides, *small)
    try:
        assert launcher.wait(LONGEST) == 0, (tmp_path / "launcher.log").read_text()
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(120)
    run = RunDir(tmp_path / "run")
    assert [step["step"] for step in _steps(run)] == [1, 2]
    # Trainer and engine are on different nodes of the plan and still agree about every logprob.
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in _steps(run))
    assert (run.export / "step_2" / "config.json").exists()
    assert (tmp_path / "launcher.log").read_text().splitlines()[-1] == str(run.path)


def test_a_run_that_is_warned_of_its_end_saves_and_goes_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    overrides = [f"run.root={tmp_path}", "run.name=run", "training.steps=30", "evaluation.prompts=0"]
    small = ["rollout.prompts_per_step=8", "training.export=false"]
    launcher = _launch(slurm, tmp_path, "cluster=minislurm", "recipe=tiny_grpo", "--wait", *overrides, *small)
    run = RunDir(tmp_path / "run")
    try:
        until(lambda: run.status.exists() and run.read_status().step >= 3, LONGEST, "step 3")
        job = (run.submitit / "job_id").read_text().strip()
        slurm.run("scancel", "--batch", "--signal=USR2", job)
        until(lambda: run.read_status().state == "requeued", 120, "the request to save to be met")
        saved = max(int(path.name.removeprefix("step_")) for path in run.checkpoints.glob("step_*"))
        assert launcher.wait(LONGEST) == 0, (tmp_path / "launcher.log").read_text()
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(120)
    assert (run.read_status().state, run.read_status().attempt) == ("completed", 2)
    # Every step once, in order, and the second attempt begins where the first one saved.
    attempts = [(step["step"], step["attempt"]) for step in _steps(run)]
    assert [step for step, _ in attempts] == list(range(1, 31))
    assert [step for step, attempt in attempts if attempt == 1][-1] == saved


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


@pytest.mark.parametrize(("victim", "node"), [("engine", "rollout0"), ("trainer", "train1")])
def test_a_killed_part_is_named_and_nothing_is_left(
    slurm: SlurmCluster, tmp_path: Path, victim: str, node: str
) -> None:
    overrides = [f"run.root={tmp_path}", "run.name=run", "training.steps=10000", "evaluation.prompts=0"]
    small = ["rollout.prompts_per_step=8", "rollout.max_restarts=0"]
    launcher = _launch(slurm, tmp_path, "cluster=minislurm", "recipe=tiny_grpo", "--wait", *overrides, *small)
    run = RunDir(tmp_path / "run")
    try:
        until(lambda: run.status.exists() and run.read_status().step >= 1, LONGEST, "step 1")
        if victim == "engine":
            # The server below the engine's parent, which may not start it again.
            killed = _pids(run, "vllm.entrypoints")
        else:
            log = (run.logs / "latest" / "supervisor-0.log").read_text()
            killed = [int(pid) for pid in re.findall(r"started trainer-1: pid (\d+) on", log)]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: run.read_status().failure is not None, 10, "the failure")
        print(f"{victim}: {time.monotonic() - began:.1f} s")
        assert launcher.wait(90) == 1
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(120)
    failure = run.read_status().failure
    assert failure is not None
    assert (run.read_status().state, failure.role, failure.node) == ("failed", victim, node)
    until(lambda: not _pids(run), 15, "no process of the run on any node")


def test_an_engine_that_spans_nodes_restarts_whole_and_its_lost_part_is_named(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Tensor parallel over two nodes of one slot each: both hold half of the weights, and neither serves alone."""
    overrides = [f"run.root={tmp_path}", "run.name=run", "training.steps=10000", "evaluation.prompts=0"]
    placed = ["training.ranks=1", "rollout.tensor_parallel=2", "cluster.slurm.rollout.partition=all"]
    small = ["rollout.prompts_per_step=8", "rollout.max_restarts=1"]
    launcher = _launch(slurm, tmp_path, "cluster=minislurm", "recipe=tiny_grpo", "--wait", *overrides, *placed, *small)
    run = RunDir(tmp_path / "run")

    def kill_rank_of(node: str) -> None:
        """The vLLM rank on `node`, found by the executor above it."""
        [executor] = [pid for pid in _pids(run, "vime.rollout.headless") if _node(pid) == node]
        [rank] = [process for process in psutil.Process(executor).children() if "Worker" in process.name()]
        rank.kill()

    try:
        until(lambda: run.status.exists() and run.read_status().step >= 2, LONGEST, "step 2")
        [begun] = [event for event in _events(run) if event["event"] == "run_started"]
        assert (begun["hosts"]["trainer"], len(begun["hosts"]["rollout"])) == (["train0"], 2)
        second = begun["hosts"]["rollout"][1]
        kill_rank_of(second)
        until(lambda: "restarted" in {event["event"] for event in _events(run)}, 30, "the engine to end")
        at = run.read_status().step
        until(lambda: run.read_status().step >= at + 3, LONGEST, "three steps after the restart")
        kill_rank_of(second)
        until(lambda: run.read_status().failure is not None, 20, "the failure")
        assert launcher.wait(90) == 1
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(120)
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
