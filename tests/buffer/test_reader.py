"""The trainer's side: late, torn and swapped files."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.buffer.made import assert_same, make_group
from vime.buffer.control import BatchMessage, Control
from vime.buffer.reader import BufferReader
from vime.buffer.writer import BufferWriter
from vime.config import Buffer
from vime.errors import BufferFault, WaitTimeout
from vime.run.directory import RunDir

CONFIG = Buffer(groups_per_chunk=2, file_timeout=1.0)
GROUPS = [make_group(index, 3, experts=300) for index in range(5)]
SAMPLES = [sample for group in GROUPS for sample in group.samples]


@pytest.fixture
def message(tmp_path: Path) -> BatchMessage:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    writer = BufferWriter(RunDir(tmp_path), control, CONFIG, experts=300)
    writer.resume(0)
    for group in GROUPS:
        writer.add(group)
    writer.commit_batch(1, {}, {})
    announced = control.next_message(0, 1, "the batch")
    assert isinstance(announced, BatchMessage)
    return announced


def test_a_batch_is_read_back_in_any_order(tmp_path: Path, message: BatchMessage) -> None:
    reader = BufferReader(RunDir(tmp_path), CONFIG)
    manifest = reader.manifest(message)
    order = [14, 0, 7, 7, 3, 1]
    for seen, index in zip(reader.samples(manifest, order), order, strict=True):
        assert_same(seen, SAMPLES[index])
    assert reader.samples(manifest, []) == []


def test_files_that_show_late_are_waited_for(tmp_path: Path, message: BatchMessage) -> None:
    reader = BufferReader(RunDir(tmp_path), Buffer(file_timeout=20))
    buffer, away = tmp_path / "buffer", tmp_path / "away"
    buffer.rename(away)

    def show() -> None:
        time.sleep(0.2)
        (buffer / "batches").mkdir(parents=True)
        content = (away / "batches" / message.manifest).read_bytes()
        (buffer / "batches" / message.manifest).write_bytes(content[:40])
        time.sleep(0.2)
        (buffer / "batches" / message.manifest).write_bytes(content)
        time.sleep(0.2)
        (away / "chunks").rename(buffer / "chunks")

    thread = threading.Thread(target=show)
    thread.start()
    manifest = reader.manifest(message)
    assert_same(reader.samples(manifest, [4])[0], SAMPLES[4])
    thread.join()


def test_a_file_that_never_shows_is_named(tmp_path: Path, message: BatchMessage) -> None:
    reader = BufferReader(RunDir(tmp_path), CONFIG)
    manifest = reader.manifest(message)
    chunk = tmp_path / "buffer" / "chunks" / manifest.chunks[1].name
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1])
    with pytest.raises(
        WaitTimeout, match=rf"waited 1 s for .*{chunk.name} with .* bytes: it has {len(content) - 1:,} bytes"
    ):
        reader.samples(manifest, [7])
    chunk.unlink()
    with pytest.raises(WaitTimeout, match=rf"{chunk.name} with .* bytes: it is not there"):
        reader.samples(manifest, [7])
    assert_same(reader.samples(manifest, [0])[0], SAMPLES[0])
    (tmp_path / "buffer" / "batches" / message.manifest).unlink()
    with pytest.raises(WaitTimeout, match=r"step_1\.json"):
        reader.manifest(message)


def test_a_file_larger_than_announced_is_not_waited_for(tmp_path: Path, message: BatchMessage) -> None:
    reader = BufferReader(RunDir(tmp_path), Buffer(file_timeout=60))
    with (tmp_path / "buffer" / "batches" / message.manifest).open("ab") as file:
        file.write(b" ")
    began = time.monotonic()
    with pytest.raises(BufferFault, match="more than the"):
        reader.manifest(message)
    assert time.monotonic() - began < 5


def test_a_chunk_that_was_swapped_is_noticed(tmp_path: Path, message: BatchMessage) -> None:
    reader = BufferReader(RunDir(tmp_path), CONFIG)
    manifest = reader.manifest(message)
    first, second = (tmp_path / "buffer" / "chunks" / manifest.chunks[i].name for i in (0, 1))
    first.write_bytes(second.read_bytes())
    swapped = manifest.model_copy(
        update={"chunks": (manifest.chunks[0].model_copy(update={"bytes": first.stat().st_size}), *manifest.chunks[1:])}
    )
    with pytest.raises(BufferFault, match="is not that of the batch of step 1"):
        reader.samples(swapped, [0])


def test_an_announcement_of_another_step_is_refused(tmp_path: Path, message: BatchMessage) -> None:
    reader = BufferReader(RunDir(tmp_path), CONFIG)
    with pytest.raises(BufferFault, match="announced as the batch of step 2, not of 1"):
        reader.manifest(message.model_copy(update={"step": 2}))
