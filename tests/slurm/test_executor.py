from __future__ import annotations

import os
from pathlib import Path

import pytest
from submitit.core.plugins import get_executors

from vime.config.compose import compose
from vime.launch.submit import submit
from vime.plan.plan import make_plan
from vime.run.directory import RunDir, State, Status
from vime.slurm import executor, scheduler
from vime.slurm.executor import SubmissionUnknown, VimeExecutor, VimeJob, Watcher, newest_job


def test_submitit_finds_the_executor_by_its_entry_point() -> None:
    assert get_executors()["vime"] is VimeExecutor


@pytest.mark.parametrize(
    ("state", "word", "done"),
    [
        ("pending", "UNKNOWN", False),
        ("running", "UNKNOWN", False),
        ("requeued", "REQUEUED", False),
        ("completed", "COMPLETED", True),
        ("failed", "FAILED", True),
        ("cancelled", "CANCELLED", True),
    ],
)
def test_a_state_that_slurm_does_not_know_is_the_runs_own_and_unknown_is_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State, word: str, done: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol, no squeue, no sacct
    run = RunDir(tmp_path)
    run.write_status(Status(state))
    watcher = Watcher(accounting=True)
    watcher.runs["7"] = run
    assert watcher.get_state("7", mode="force") == word
    assert watcher.is_done("7") == done
    assert watcher.get_state("8", mode="force") == "UNKNOWN"


def test_the_controller_is_asked_first_and_accounting_for_what_it_has_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def ask(command: list[str]) -> str | None:
        asked.append(command[0])
        if command[0] == "squeue":
            return "7 RUNNING\n9 PENDING\n"
        if command[0] == "scontrol":
            return "JobId=7 JobName=x JobState=RUNNING Reason=None"
        return "8+0|FAILED\n8+1|CANCELLED\n"

    monkeypatch.setattr(scheduler, "ask", ask)
    assert scheduler.job_states(["7", "8"], accounting=True) == {"7": "RUNNING", "8": "FAILED"}
    # One question, however many jobs a sweep has.
    assert asked == ["squeue", "sacct"]
    assert scheduler.job_states(["7"]) == {"7": "RUNNING"}


def test_a_job_asks_the_shared_watcher() -> None:
    assert isinstance(VimeJob.watcher, Watcher)


def test_a_submission_that_is_not_answered_is_looked_up_and_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("sbatch", "sleep 30"), ("squeue", f"cat {tmp_path}/queue")):
        (tmp_path / name).write_text(f"#!/bin/sh\nexec {text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(executor, "ASK_TIMEOUT", 0.1)
    monkeypatch.setattr(executor, "FIND_INTERVAL", 0.01)
    config = compose("minislurm", "tiny_grpo", [f"run.root={tmp_path}/runs", "run.name=mine"])
    (tmp_path / "queue").write_text("40 other\n")
    with pytest.raises(SubmissionUnknown, match=r"sbatch did not answer .* has no job mine yet.*/runs/mine is kept"):
        submit(config, make_plan(config), wait=False)
    assert RunDir(tmp_path / "runs" / "mine").submission.is_file()
    config = compose("minislurm", "tiny_grpo", [f"run.root={tmp_path}/runs", "run.name=late"])
    (tmp_path / "queue").write_text("40 other\n41 late\n")
    assert submit(config, make_plan(config), wait=False) == 0
    assert newest_job(RunDir(tmp_path / "runs" / "late")) == "41"
