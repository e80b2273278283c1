"""A whole run, interrupted and resumed, equals one that was not: its losses, its batches and its last checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.supervise.job import check_killed_real_run
from tests.training.ranks import Ranks
from tests.training.test_checkpoint import _tensors
from vime.run.directory import RunDir, Status

REPOSITORY = Path(__file__).parents[2]
STEPS = 12
COMPARED = ("train/loss", "train/lr", "train/grad_norm", "train/entropy_loss", "rollout/response_len/mean")


SFT = (
    "recipe=tiny_sft",
    f"training.steps={STEPS}",
    "training.save_interval=4",
    "training.warmup_steps=4",
    "rollout.prompts_per_step=256",
)
GRPO = (
    "recipe=tiny_grpo",
    "model.warmup=null",
    "model.tiny.initializer_range=0.08",
    "data.reward=tests.training.letter_reward:letter_reward",
    "rollout.prompts_per_step=16",
    "evaluation.prompts=0",
    "training.steps=5",
    "training.save_interval=2",
    # test_main_job.py has the other layouts.
    "training.pipeline_parallel=2",
)


def launch(root: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the launcher on a small run of two ranks, or with `--resume`."""
    settings = [
        "cluster=local",
        f"run.root={root}",
        f"run.name={name}",
        "training.adam_eps=1e-4",
        "training.export=false",
    ]
    with open(root / f"{name}.log", "ab") as output:
        return subprocess.Popen(
            [sys.executable, str(REPOSITORY / "launch.py"), *([] if "--resume" in arguments else settings), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TEST_MARKER": str(root / name)},
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; [] when there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_step(run: RunDir, step: int) -> None:
    """Wait until the metrics of `step` are written."""
    deadline = time.monotonic() + 240
    while not any(line["step"] >= step for line in lines(run.metrics)):
        assert time.monotonic() < deadline, f"waited 240 s for step {step}"
        time.sleep(0.01)


def interrupt(run: RunDir, how: str) -> None:
    """End the first attempt between two checkpoints: a rank is killed, or the supervisor is told that time is up."""
    log = (run.logs / "attempt_1" / "supervisor-0.log").read_text()
    if how == "killed":
        os.kill(int(re.findall(r"started trainer-1: pid (\d+)", log)[0]), signal.SIGKILL)
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"vime.supervise.supervisor" in command and str(run.path).encode() in command:
                os.kill(int(entry.name), signal.SIGUSR2)


def finished(run: RunDir, process: subprocess.Popen[bytes]) -> Status:
    """The run's status once its launcher has ended."""
    try:
        process.wait(300)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(60)
        raise
    return run.read_status()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    root = tmp_path_factory.mktemp("whole")
    run = RunDir(root / "run")
    assert finished(run, launch(root, "run", *SFT)).state == "completed", (root / "run.log").read_text()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_12", "step_8"]
    assert list((run.buffer / "chunks").iterdir()) == []  # consumed, and covered by a checkpoint
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "state", "layout"),
    [("killed", "failed", []), ("time is up", "timeout", ["training.tensor_parallel=2"])],
    ids=["killed", "time_is_up_and_resumed_in_another_layout"],
)
def test_an_interrupted_run_equals_an_uninterrupted_one(
    whole: RunDir, ranks: Ranks, tmp_path: Path, how: str, state: str, layout: list[str]
) -> None:
    run = RunDir(tmp_path / "run")
    first = launch(tmp_path, "run", *SFT)
    wait_step(run, 5)
    interrupt(run, how)
    status = finished(run, first)
    assert status.state == state
    reached = max(line["step"] for line in lines(run.metrics))
    assert reached < STEPS, "it was not interrupted"
    saved = [event["step"] for event in lines(run.events) if event["event"] == "checkpoint_saved"]
    # Told in time, it saved the step that it was in; killed, it has the last one that was due.
    assert saved[-1] == (reached if how == "time is up" else reached // 4 * 4)

    second = launch(tmp_path, "run", "--resume", str(run.path), *layout)
    status = finished(run, second)
    assert (status.state, status.attempt) == ("completed", 2), (tmp_path / "run.log").read_text()
    (loaded,) = [event for event in lines(run.events) if event["event"] == "checkpoint_loaded"]
    assert (loaded["step"], loaded["attempt"], loaded["saved_by_attempt"]) == (saved[-1], 2, 1)
    assert loaded["same_layout"] == (not layout)

    steps = {line["step"]: line for line in lines(run.metrics)}  # a step trained twice counts as it was last
    assert [line["attempt"] for line in steps.values()] == [1] * saved[-1] + [2] * (STEPS - saved[-1])
    expected = {line["step"]: line for line in lines(whole.metrics)}
    assert sorted(steps) == sorted(expected) == list(range(1, STEPS + 1))
    for step, line in steps.items():
        for name in COMPARED:
            assert line[name] == pytest.approx(expected[step][name], abs=1e-5, rel=1e-5), (step, name)
    assert sorted(path.name for path in run.checkpoints.iterdir())[0] == "step_12"
    (mine,) = ranks.run(1, _tensors, run.checkpoints / "step_12")
    (theirs,) = ranks.run(1, _tensors, whole.checkpoints / "step_12")
    for name, tensor in theirs.items():
        assert torch.allclose(mine[name], tensor, atol=1e-5), name
    cursors = [json.loads((r.checkpoints / "step_12" / "complete").read_bytes())["cursor"] for r in (run, whole)]
    assert cursors[0] == cursors[1]


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_not_started_again(whole: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(whole.path, run.path, symlinks=True)
    run.write_status(replace(run.read_status(), state="failed"))
    before = run.metrics.read_bytes()
    shutil.rmtree(run.checkpoints)
    (run.checkpoints / "step_4").mkdir(parents=True)  # what a copy that broke off may look like
    refused = launch(tmp_path, "run", "--resume", str(run.path))
    status = finished(run, refused)
    assert (refused.returncode, status.state, status.attempt) == (2, "failed", 1)
    assert (tmp_path / "run.log").read_text() == (
        f"launch.py: cannot resume: {run.checkpoints} has no complete checkpoint; step_4 is incomplete: it has no"
        " complete\n"
    )
    assert run.metrics.read_bytes() == before
    # SLURM may start a run again that has saved nothing yet. It begins anew, with the batches that are there.
    (run.checkpoints / "step_4").rmdir()
    again = [sys.executable, "-c", f"from vime.supervise.guardian import guard; guard({str(run.path)!r})"]
    subprocess.run(again, cwd=REPOSITORY, check=True, timeout=300)
    status = run.read_status()
    assert (status.state, status.attempt, status.step) == ("completed", 2, STEPS)
    first, second = ([line for line in lines(run.metrics) if line["attempt"] == attempt] for attempt in (1, 2))
    assert [[line[name] for name in COMPARED] for line in second] == [
        [line[name] for name in COMPARED] for line in first
    ]


@pytest.fixture(scope="module")
def whole_pipeline(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with an engine, and a trainer of two pipeline stages, that nothing interrupts."""
    root = tmp_path_factory.mktemp("pipeline")
    run = RunDir(root / "run")
    assert finished(run, launch(root, "run", *GRPO)).state == "completed", (root / "run.log").read_text()
    return run


@pytest.mark.slow
def test_a_pipeline_trains_too(whole_pipeline: RunDir) -> None:
    steps = lines(whole_pipeline.metrics)
    assert len(steps) == 5
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in steps) < 1e-4
    assert len([event for event in lines(whole_pipeline.events) if event["event"] == "weights_updated"]) == 6


@pytest.mark.slow
def test_a_run_whose_engine_was_killed_goes_on_with_the_same_samples(whole_pipeline: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    first = launch(tmp_path, "run", *GRPO)
    wait_step(run, 3)
    # The role that leaves the most behind. tests/supervise kills each role, and tests/slurm a real trainer.
    check_killed_real_run(first, run, str(run.path), "engine-0")
    second = launch(tmp_path, "run", "--resume", str(run.path))
    assert finished(run, second).state == "completed", (tmp_path / "run.log").read_text()
    expected = {line["step"]: line for line in lines(whole_pipeline.metrics)}
    resumed = [line for line in lines(run.metrics) if line["attempt"] == 2]
    assert [line["step"] for line in resumed] in ([3, 4, 5], [5])
    for line in lines(run.metrics):
        for name, value in expected[line["step"]].items():
            if name.startswith(("train/", "rollout/")) and name != "rollout/wait_time_ratio":
                assert line[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (line["attempt"], line["step"], name)
    assert all(line["train/grad_norm"] > 1e-3 for line in expected.values())  # there was something to lose
    updates = [event for event in lines(run.events) if event["event"] == "weights_updated" and event["attempt"] == 2]
    # The engine of the second attempt began with the initial policy, and was given the checkpoint's before anything.
    assert (updates[0]["version"], updates[0]["verified"]) == (resumed[0]["step"] - 1, True)
