"""Writer and reader, both killed at random, attempt after attempt: nothing is lost and nothing is trained twice."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.buffer.crash import forked
from tests.buffer.made import connect
from tests.buffer.test_writer import CONFIG, PER_BATCH, assert_complete, write_batches
from vime.buffer.control import BatchMessage, Control
from vime.buffer.manifest import committed
from vime.buffer.reader import BufferReader
from vime.run.directory import RunDir
from vime.run.files import commit

STEPS, SAVE_EVERY = 5, 2
PATIENCE = 300.0
"""Seconds that a role may take on a machine that is busy with other things."""
LONG = 10_000
"""More changes to the filesystem than a run makes: never killed."""


def read_checkpoint(folder: Path) -> tuple[int, list[int]]:
    """Steps trained, and the groups that were, in order; as the newest checkpoint has it."""
    path = folder / "checkpoint.json"
    if not path.exists():
        return 0, []
    content = json.loads(path.read_text())
    return content["step"], content["groups"]


def train(folder: Path, control: Control) -> None:
    """What trainer rank 0 does: every batch in its turn, a checkpoint every other step, then the files go."""
    step, groups = read_checkpoint(folder)
    reader = BufferReader(RunDir(folder), CONFIG)
    position = 0
    while step < STEPS:
        message = control.next_message(position, PATIENCE, f"the batch of step {step + 1}")
        position += 1
        assert isinstance(message, BatchMessage)
        assert message.step == step + 1, "the next batch, and no other, is announced next"
        manifest = reader.manifest(message)
        assert_complete(folder, manifest)
        groups = groups + sorted({entry.group for entry in manifest.samples})
        step += 1
        if step % SAVE_EVERY == 0 or step == STEPS:
            commit(folder / "checkpoint.json", [json.dumps({"step": step, "groups": groups}).encode()])
            reader.collect(step)
        control.publish_consumed(step)


def ended(child: int, timeout: float) -> int | None:
    """The child's exit code; None when it still runs after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def attempt(folder: Path, number: int, writer_calls: int, reader_calls: int) -> bool:
    """One attempt of the run, whose two roles are killed at these points; True when it came to its end."""
    control, port = Control.serve("127.0.0.1", number, "t")
    done, _ = read_checkpoint(folder)
    writer = forked(writer_calls, lambda: write_batches(folder, connect(port, number), done, STEPS))
    reader = forked(reader_calls, lambda: train(folder, connect(port, number)))
    code = ended(writer, PATIENCE)
    # One role's end is the end of the attempt: the other is given a moment, as by a supervisor, and killed.
    other = ended(reader, PATIENCE if code == 0 else 0.05)
    if other is None:
        os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)
    assert code in (0, 9), f"the writer of attempt {number} failed"
    assert other in (0, 9, None), f"the reader of attempt {number} failed"
    del control
    return code == other == 0


# The writer makes some 90 changes to files in a run, the reader some 50.
KILLS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 60)), max_size=4)


@settings(max_examples=25)
@given(kills=KILLS)
def test_random_kills_lose_and_repeat_nothing(tmp_path_factory: object, kills: list[tuple[int, int]]) -> None:
    folder: Path = tmp_path_factory.mktemp("run")  # type: ignore[attr-defined]
    finished = False
    number = 0
    for number, (writer_calls, reader_calls) in enumerate(kills, 1):
        finished = attempt(folder, number, writer_calls, reader_calls)
        step, groups = read_checkpoint(folder)
        assert groups == list(range(step * PER_BATCH)), "what a checkpoint covers was trained once, in order"
        for manifest in committed(folder / "buffer"):
            if manifest.step > step:
                assert_complete(folder, manifest)
        if finished:
            break
    if not finished:
        assert attempt(folder, number + 1, LONG, LONG), "an attempt that nothing disturbs comes to its end"
    assert read_checkpoint(folder) == (STEPS, list(range(STEPS * PER_BATCH)))
    assert not committed(folder / "buffer"), "nothing is left behind"
