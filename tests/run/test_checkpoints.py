"""Which checkpoints count: only those with their marker and all their files, whatever a kill left behind."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.training.ranks import tiny_config
from vime.config import Config
from vime.errors import UserError
from vime.run import checkpoints
from vime.run.checkpoints import MARKER, Facts, begin, commit, fixed_settings, newest, prune, survey

CONFIG = tiny_config(training={"save_interval": 1})


def save(folder: Path, step: int, keep: int = 2, config: Config = CONFIG) -> None:
    """A checkpoint of two small files, saved and pruned as the trainer does."""
    writing = begin(folder, step)
    (writing / "__0_0.distcp").write_bytes(b"weights" * step)
    (writing / "common.pt").write_bytes(b"rest")
    facts = Facts(
        step=step,
        cursor={"epoch": 0, "position": step},
        attempt=1,
        time="now",
        tensor_parallel=1,
        pipeline_parallel=1,
        settings=fixed_settings(config),
    )
    commit(writing, facts)
    prune(folder, keep)


def steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    return [checkpoint.facts.step for checkpoint in survey(folder)[0]]


def test_the_newest_complete_ones_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 10):  # 10 is newer than 4, though not as text
        save(tmp_path, step)
    assert steps(tmp_path) == [4, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_4"]
    checkpoint, incomplete = newest(tmp_path, CONFIG)
    assert (checkpoint.facts.step, incomplete) == (10, [])
    assert checkpoint.facts.cursor == {"epoch": 0, "position": 10}
    assert checkpoint.facts.files == {"__0_0.distcp": 70, "common.pt": 4}
    assert checkpoint.bytes == 74


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / MARKER).unlink(), f"it has no {MARKER}"),
        (lambda path: (path / "common.pt").unlink(), "common.pt is missing"),
        (lambda path: os.truncate(path / "common.pt", 3), "common.pt has 3 of 4 bytes"),
        (lambda path: (path / MARKER).write_text("{"), f"its {MARKER} does not read"),
        (lambda path: path.rename(path.with_name("step_5")), f"its {MARKER} is that of step 4"),
        (lambda path: path.rename(path.with_name(".step_4.tmp")), "its saving was interrupted"),
    ],
)
def test_an_incomplete_newest_one_is_reported_and_the_one_before_it_used(
    tmp_path: Path, damage: Any, reason: str
) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    damage(tmp_path / "step_4")
    checkpoint, incomplete = newest(tmp_path, CONFIG)
    assert checkpoint.facts.step == 2
    assert [one.reason.startswith(reason) for one in incomplete] == [True]
    # Training again up to that step replaces it, and an incomplete one never counts among those that are kept.
    save(tmp_path, 4)
    assert steps(tmp_path) == [2, 4]


def test_nothing_to_resume_from_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        newest(tmp_path / "checkpoints", CONFIG)
    assert str(caught.value) == f"cannot resume: {tmp_path}/checkpoints has no complete checkpoint"
    save(tmp_path, 3)
    (tmp_path / "step_3" / MARKER).unlink()
    with pytest.raises(UserError) as caught:
        newest(tmp_path, tiny_config())
    assert str(caught.value) == (
        f"cannot resume: {tmp_path} has no complete checkpoint; training.save_interval is 0, which saves none;"
        f" step_3 is incomplete: it has no {MARKER}"
    )


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest(tmp_path, tiny_config(training={"tensor_parallel": 2, "learning_rate": 1.0, "steps": 7}))  # these may change
    with pytest.raises(UserError, match=r"step_1 was saved with run\.seed=1234, which is 7 now"):
        newest(tmp_path, tiny_config(run={"seed": 7}))


def test_a_kill_at_any_line_of_a_save_leaves_a_usable_checkpoint(tmp_path: Path) -> None:
    seen = set()
    for line in range(1, 1000):
        folder = tmp_path / "checkpoints"
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 1, keep=1)
        killed = _killed_at(line, folder)
        found = steps(folder)
        assert found in ([1], [2], [1, 2]), f"killed at line event {line}: {survey(folder)}"
        seen.add((tuple(found), len(survey(folder)[1])))
        save(folder, 3, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step_3"], f"left by a kill at line event {line}"
        if not killed:
            break
    assert line > 40
    # Before its name, after it, and after the older one went: all were met.
    assert {((1,), 0), ((1,), 1), ((1, 2), 0), ((2,), 0)} == seen


def _killed_at(line: int, folder: Path) -> bool:
    """Save step 2 in a child, killed at the `line`-th line of checkpoint_folder that it executes; False if none."""
    child = os.fork()
    if child == 0:
        count = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            if frame.f_code.co_filename != checkpoints.__file__:
                return None
            if event == "line":
                count += 1
                if count == line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            save(folder, 2, keep=1)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
