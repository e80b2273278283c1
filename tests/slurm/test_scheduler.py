from __future__ import annotations

from pathlib import Path

import pytest

from vime.run.directory import State
from vime.slurm import scheduler
from vime.slurm.scheduler import job_fate, read_notice, read_sacct


def test_the_leader_of_a_heterogeneous_job_is_its_row_plus_0() -> None:
    rows = "123+0|RUNNING\n123+0.batch|RUNNING\n123+1|PENDING\n124|CANCELLED by 1000\n125_3|COMPLETED\n"
    assert read_sacct(rows) == {"123": "RUNNING", "124": "CANCELLED", "125_3": "COMPLETED"}
    assert read_sacct("") == {}


@pytest.mark.parametrize(
    ("why", "state"),
    [
        ("", "cancelled"),
        ("TIME LIMIT", "timeout"),
        ("JOB REQUEUE", "requeued"),
        ("PREEMPTION", "requeued"),
        ("NODE FAILURE", "requeued"),
    ],
)
def test_why_slurm_ends_a_job(tmp_path: Path, why: str, state: State) -> None:
    assert read_notice(why) == state
    log = tmp_path / "7_0_log.out"
    due = f" DUE TO {why}" if why else ""
    old = "slurmstepd-a: error: *** JOB 7 ON a CANCELLED AT 2026-11-29T20:00:00 DUE TO TIME LIMIT ***\n"
    log.write_text(f"{old}slurmstepd-a: error: *** JOB 7 ON a CANCELLED AT 2026-11-29T21:03:35{due} ***\nmore\n")
    assert job_fate("7", log) == state


@pytest.mark.parametrize(("known", "state"), [("PENDING", "requeued"), ("CANCELLED", "cancelled"), (None, "cancelled")])
def test_a_job_that_ends_without_a_notice_was_requeued_if_it_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str | None, state: State
) -> None:
    monkeypatch.setattr(scheduler, "NOTICE_TIME", 0.1)
    monkeypatch.setattr(scheduler, "job_states", lambda jobs: {"7": known} if known else {})
    assert job_fate("7", tmp_path / "none") == state
