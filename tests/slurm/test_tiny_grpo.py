"""The main job on a real Slurm with its real parts: two trainer nodes and one rollout node."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

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
