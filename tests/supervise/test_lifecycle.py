from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vime.run.checkpoints import MARKER, Facts, begin, commit, newest_checkpoint
from vime.run.directory import Failure, RunDir, State, Status
from vime.supervise.lifecycle import begin_attempt, no_progress, refusals, refused_nodes

FAILURE = Failure("trainer", 0, "n", 1, None, "now", "log", [])


def _run(path: Path, *events: dict[str, Any]) -> RunDir:
    run = RunDir(path)
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"torn')
    return run


def _started(attempt: int, checkpoint: int) -> dict[str, Any]:
    return {"event": "run_started", "attempt": attempt, "checkpoint": checkpoint}


def save(run: RunDir, step: int) -> None:
    """A complete checkpoint."""
    writing = begin(run.checkpoints, step)
    (writing / "weights").write_bytes(b"w")
    commit(
        writing,
        Facts(step=step, cursor={}, attempt=1, time="now", tensor_parallel=1, pipeline_parallel=1, settings={}),
    )


@pytest.mark.parametrize("state", ["running", "requeued", "failed", "cancelled", "timeout"])
def test_a_job_that_starts_again_is_the_next_attempt(tmp_path: Path, state: State) -> None:
    run = _run(tmp_path, _started(1, 0))
    run.write_status(Status(state, attempt=1, step=5, started="then", ended="now", failure=FAILURE))
    assert begin_attempt(run) == Status("pending", attempt=2, step=5, started="then")
    assert run.read_status().attempt == 2


def test_what_the_launcher_wrote_stands_and_a_completed_run_stays_completed(tmp_path: Path) -> None:
    run = _run(tmp_path, _started(1, 0))
    for status in (Status("pending", attempt=1), Status("completed", attempt=1)):
        run.write_status(status)
        assert begin_attempt(run) == status


def test_an_attempt_that_ended_before_its_roles_started_is_begun_again(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.write_status(Status("requeued", attempt=1))
    assert begin_attempt(run).attempt == 1


def test_only_a_checkpoint_with_its_marker_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert newest_checkpoint(run) == 0
    for name, complete in (("step_4", True), ("step_12", True), ("step_20", False), (".step_30.tmp", True)):
        save(run, int(name.partition(".tmp")[0].rpartition("_")[2]))
        if not complete:
            (run.checkpoints / name / MARKER).unlink()
        elif name.startswith("."):
            (run.checkpoints / "step_30").rename(run.checkpoints / name)
    save(run, 15)
    (run.checkpoints / "step_15" / "weights").unlink()
    assert newest_checkpoint(run) == 12, "nor one that was damaged later"


@pytest.mark.parametrize(
    ("begun", "now", "ends"),
    [
        ([], 0, False),
        ([0], 0, False),
        ([0, 0], 0, True),
        ([0, 0], 4, False),
        ([0, 4, 4], 4, True),
        ([0, 4, 4], 8, False),
        ([0, 0, 4], 4, False),
    ],
)
def test_a_chain_ends_after_two_attempts_that_saved_nothing_new(
    tmp_path: Path, begun: list[int], now: int, ends: bool
) -> None:
    run = _run(tmp_path, *(_started(number, step) for number, step in enumerate(begun, 1)))
    if now:
        save(run, now)
    assert bool(no_progress(run)) == ends


def test_a_run_that_is_resumed_by_hand_starts_a_new_chain(tmp_path: Path) -> None:
    refused = {"event": "nodes_refused", "nodes": ["n3", "n1"]}
    run = _run(tmp_path, _started(1, 0), _started(2, 0), refused, {"event": "resumed"})
    assert no_progress(run) == ""
    assert (refusals(run), refused_nodes(run)) == (0, [])
    run = _run(tmp_path, {"event": "resumed"}, refused, {"event": "nodes_refused", "nodes": ["n1"]})
    assert (refusals(run), refused_nodes(run)) == (2, ["n1", "n3"])
