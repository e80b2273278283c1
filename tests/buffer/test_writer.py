"""The generator's side: batches in order, the byte budget, and what a crash at any point leaves behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.buffer.crash import forked
from tests.buffer.made import assert_same, connect, make_group
from vime.buffer.control import BatchMessage, Control
from vime.buffer.manifest import Manifest, committed
from vime.buffer.reader import BufferReader
from vime.buffer.writer import BufferWriter, Resumed
from vime.config import Buffer
from vime.errors import UserError, WaitTimeout
from vime.run.directory import RunDir

CONFIG = Buffer(groups_per_chunk=2)
PER_BATCH = 5


def write_batches(folder: Path, control: Control, done: int, last: int) -> Resumed:
    """What a generator does: take up what is there, then write the batches up to step `last`, 5 groups each."""
    writer = BufferWriter(RunDir(folder), control, CONFIG, experts=300)
    resumed = writer.resume(done)
    position = done * PER_BATCH if resumed.cursor is None else resumed.cursor["next"]
    for step in range(resumed.step, last + 1):
        for index in range(position, position + PER_BATCH):
            if not (step == resumed.step and index in resumed.groups):
                writer.add(make_group(index, experts=300))
        position += PER_BATCH
        writer.commit_batch(step, {"rollout/raw_reward": 0.5}, {"next": position})
    return resumed


def announced(control: Control) -> list[BatchMessage]:
    messages = []
    for position in range(control.posted()):
        # The newest may have been counted and not set when its writer was killed.
        if control.try_get(f"inbox/{position}") is not None:
            message = control.next_message(position, 1, "a message")
            assert isinstance(message, BatchMessage)
            messages.append(message)
    return messages


def assert_complete(folder: Path, manifest: Manifest) -> None:
    """Every sample of the batch is there, exact, and the groups are those of its step, each once."""
    assert manifest.cursor == {"next": manifest.step * PER_BATCH}
    groups = list(range((manifest.step - 1) * PER_BATCH, manifest.step * PER_BATCH))
    wanted = {index: make_group(index, experts=300).samples for index in groups}
    samples = BufferReader(RunDir(folder), CONFIG).samples(manifest, range(len(manifest.samples)))
    seen: dict[int, int] = dict.fromkeys(groups, 0)
    for entry, sample in zip(manifest.samples, samples, strict=True):
        assert_same(sample, wanted[entry.group][seen[entry.group]])
        seen[entry.group] += 1
    assert seen == {index: len(wanted[index]) for index in groups}


def held(chunks: Path) -> int:
    return sum(path.stat().st_size for path in chunks.glob("*.safetensors"))


def temporaries(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def test_batches_are_written_and_announced_in_order(tmp_path: Path) -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    resumed = write_batches(tmp_path, control, 0, 3)
    assert resumed == Resumed(step=1, cursor=None, groups=frozenset(), announced=(), discarded=())
    reader = BufferReader(RunDir(tmp_path), CONFIG)
    messages = announced(control)
    assert [message.step for message in messages] == [1, 2, 3]
    for message in messages:
        manifest = reader.manifest(message)
        assert_complete(tmp_path, manifest)
        assert len(manifest.chunks) == 3, "5 groups, 2 a chunk"
        assert manifest.metrics == {"rollout/raw_reward": 0.5}
        assert manifest.version == max(s.newest_version for s in reader.samples(manifest, range(len(manifest.samples))))
    assert oct((tmp_path / "buffer" / "chunks" / manifest.chunks[0].name).stat().st_mode)[-3:] == "600"


def test_steps_follow_each_other_and_a_batch_has_samples(tmp_path: Path) -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    writer = BufferWriter(RunDir(tmp_path), control, CONFIG)
    writer.resume(0)
    with pytest.raises(ValueError, match="batch of step 1 has no samples"):
        writer.commit_batch(1, {}, {})
    writer.add(make_group(0))
    with pytest.raises(ValueError, match="after step 0 is 1, not 2"):
        writer.commit_batch(2, {}, {})
    writer.commit_batch(1, {}, {})
    writer.add(make_group(1))
    with pytest.raises(ValueError, match="after step 1 is 2, not 1"):
        writer.commit_batch(1, {}, {})


def test_the_byte_budget_waits_for_the_oldest_batch_to_be_trained(tmp_path: Path) -> None:
    control, port = Control.serve("127.0.0.1", 1, "t")
    write_batches(tmp_path, control, 0, 2)
    # The smallest budget there is, filled to the brim by two batches of a size that is made up.
    writer = BufferWriter(RunDir(tmp_path), connect(port), Buffer(max_bytes=1 << 20, wait_timeout=0.3))
    writer.resume(0)
    writer._waiting = {1: (1 << 20) - 100, 2: 90}
    writer.wait_for_room(10)
    with pytest.raises(
        WaitTimeout, match=r"to train the batch of step 1: 1,048,566 bytes wait .* buffer.max_bytes=1,048,576"
    ):
        writer.wait_for_room(11)
    writer._config = Buffer(max_bytes=1 << 20, wait_timeout=30)
    threading.Timer(0.3, lambda: control.publish_consumed(1)).start()
    began = time.monotonic()
    writer.wait_for_room(11)
    assert 0.2 < time.monotonic() - began < 5
    threading.Timer(0.1, lambda: control.publish_consumed(2)).start()
    with pytest.raises(UserError, match=r"buffer\.max_bytes=1048576 is less than the batch of step 3 alone"):
        writer.wait_for_room((1 << 20) + 1)


def test_the_budget_bounds_what_lies_on_disk(tmp_path: Path) -> None:
    control, port = Control.serve("127.0.0.1", 1, "t")
    run_dir, config = RunDir(tmp_path), Buffer(groups_per_chunk=1, max_bytes=1 << 20, wait_timeout=60)
    chunks = tmp_path / "buffer" / "chunks"
    most = 0

    def generate() -> None:
        writer = BufferWriter(run_dir, connect(port), config, experts=300)
        writer.resume(0)
        for step in range(1, 21):
            for index in range(step * 10, step * 10 + 10):
                writer.add(make_group(index, size=16, experts=300))
            writer.commit_batch(step, {}, {})

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    reader = BufferReader(run_dir, config)
    for step in range(1, 21):
        message = control.next_message(step - 1, 60, f"step {step}")
        assert isinstance(message, BatchMessage)
        assert message.step == step
        if step < 14:  # then the last batch fits in, and nothing is left to wait
            # Until the generator has nothing to do but wait: it stops only within one chunk of the bound.
            deadline = time.monotonic() + 20
            while (now := held(chunks)) < 0.9 * (1 << 20):
                assert time.monotonic() < deadline, (step, now)
                time.sleep(0.01)
            most = max(most, now)
        reader.collect(step)
        control.publish_consumed(step)
    thread.join(60)
    assert not thread.is_alive()
    assert most <= 1 << 20


def test_a_resumed_run_trains_what_was_committed(tmp_path: Path) -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    write_batches(tmp_path, control, 0, 5)
    writer = BufferWriter(RunDir(tmp_path), control, CONFIG, experts=300)
    writer.resume(0)
    for index in (25, 26, 27):
        writer.add(make_group(index, experts=300))  # one chunk of two committed, the third only in memory
    (tmp_path / "buffer" / "chunks" / "chunk_99-aa.safetensors.tmp").write_bytes(b"half")

    again, _ = Control.serve("127.0.0.1", 2, "t")
    resumed = write_batches(tmp_path, again, 2, 7)
    assert resumed == Resumed(
        step=6, cursor={"next": 25}, groups=frozenset({25, 26}), announced=(3, 4, 5), discarded=()
    )
    assert [message.step for message in announced(again)] == [3, 4, 5, 6, 7]
    assert [m.step for m in BufferReader(RunDir(tmp_path), CONFIG).pending(2)] == [3, 4, 5, 6, 7]
    for manifest in committed(tmp_path / "buffer"):
        assert_complete(tmp_path, manifest)
    assert not temporaries(tmp_path)


def test_an_older_checkpoint_discards_batches_that_do_not_follow_it(tmp_path: Path) -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    write_batches(tmp_path, control, 0, 6)
    BufferReader(RunDir(tmp_path), CONFIG).collect(4)
    loose = BufferWriter(RunDir(tmp_path), control, CONFIG, experts=300)
    loose.resume(4)
    for index in (30, 31):
        loose.add(make_group(index, experts=300))
    again, _ = Control.serve("127.0.0.1", 2, "t")
    resumed = write_batches(tmp_path, again, 2, 4)
    assert resumed == Resumed(step=3, cursor=None, groups=frozenset(), announced=(), discarded=(5, 6))
    assert [message.step for message in announced(again)] == [3, 4]
    for manifest in committed(tmp_path / "buffer"):
        assert_complete(tmp_path, manifest)


def tear(path: Path) -> None:
    """As a crash of the file server, or a full disk of it, leaves a file."""
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    """One bit of another value, in the middle of the data."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    """As a file is whose data never reached the disk."""
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("what", "harm"),
    [
        *(("chunk", harm) for harm in (tear, flip, Path.unlink)),
        *(("manifest", harm) for harm in (tear, empty)),
        ("trained manifest", tear),
        *(("loose chunk", harm) for harm in (tear, flip)),
    ],
)
def test_what_is_damaged_is_dropped_said_and_generated_again(
    tmp_path: Path, what: str, harm: Callable[[Path], None]
) -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    write_batches(tmp_path, control, 0, 4)
    writer = BufferWriter(RunDir(tmp_path), control, CONFIG, experts=300)
    writer.resume(1)
    for index in range(20, 24):
        writer.add(make_group(index, experts=300))  # two chunks of no batch
    chunks, batches = tmp_path / "buffer" / "chunks", tmp_path / "buffer" / "batches"
    path = {
        "chunk": chunks / committed(tmp_path / "buffer")[1].chunks[1].name,
        "manifest": batches / "step_3.json",
        "trained manifest": batches / "step_2.json",
        "loose chunk": max(chunks.iterdir()),
    }[what]
    harm(path)
    done = 2 if "trained" in what else 1
    again, _ = Control.serve("127.0.0.1", 2, "t")
    resumed = write_batches(tmp_path, again, done, 6)
    assert len(resumed.damaged) == 1
    assert path.name in resumed.damaged[0]
    first = {"chunk": 3, "manifest": 3, "trained manifest": 5, "loose chunk": 5}[what]
    assert resumed.step == first
    assert resumed.groups == (frozenset({20, 21}) if "loose" in what else frozenset())
    assert [message.step for message in announced(again)] == list(range(done + 1, 7))
    left = committed(tmp_path / "buffer")
    for manifest in left:
        assert_complete(tmp_path, manifest)
    named = [chunk.name for manifest in left for chunk in manifest.chunks]
    assert sorted(named) == sorted(path.name for path in chunks.iterdir()), "nothing is left over, nothing used twice"
    third, _ = Control.serve("127.0.0.1", 3, "t")
    assert BufferWriter(RunDir(tmp_path), third, CONFIG, experts=300).resume(done).damaged == ()


def test_a_name_is_never_used_for_two_contents(tmp_path: Path) -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    write_batches(tmp_path, control, 0, 2)
    before = {chunk.name for manifest in committed(tmp_path / "buffer") for chunk in manifest.chunks}
    again, _ = Control.serve("127.0.0.1", 2, "t")
    write_batches(tmp_path, again, 2, 4)
    after = {chunk.name for manifest in committed(tmp_path / "buffer") for chunk in manifest.chunks}
    assert not before & after


WRITER = """
import sys
from pathlib import Path
from tests.buffer.made import connect
from tests.buffer.test_writer import write_batches
control = connect(int(sys.argv[1]), int(sys.argv[2]))
control.put("ready", 1)
write_batches(Path(sys.argv[3]), control, 0, int(sys.argv[4]))
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_writer_killed_at_any_moment_loses_and_repeats_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    last = 12
    for attempt in range(1, 4):
        control, port = Control.serve("127.0.0.1", attempt, "t")
        arguments = [str(port), str(attempt), str(tmp_path), str(last)]
        child = subprocess.Popen([sys.executable, "-c", WRITER, *arguments])
        try:
            control.get("ready", 120, "the writer")
            if attempt < 3:
                time.sleep(rng.uniform(0.0, 0.25))
                os.kill(child.pid, signal.SIGKILL)
        finally:
            code = child.wait(120)
        messages = announced(control)
        steps = [message.step for message in messages]
        assert steps == list(range(1, len(steps) + 1)), "announced in order, from the first that is not trained"
        reader = BufferReader(RunDir(tmp_path), CONFIG)
        for message in messages:
            assert_complete(tmp_path, reader.manifest(message))
        for manifest in committed(tmp_path / "buffer"):
            assert_complete(tmp_path, manifest)
    assert code == 0
    assert steps == list(range(1, last + 1))
    assert not temporaries(tmp_path)


def crash_after(calls: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child that ends before its `calls`-th change to files; True when it was finished before that."""
    code = os.waitstatus_to_exitcode(os.waitpid(forked(calls, work), 0)[1])
    assert code in (0, 9)
    return code == 0


def test_a_crash_before_every_single_change_of_the_writer(tmp_path: Path) -> None:
    calls = 0
    finished = False
    while not finished:
        folder = tmp_path / f"crash-{calls}"
        folder.mkdir()
        control, port = Control.serve("127.0.0.1", 1, "t")
        finished = crash_after(calls, lambda folder=folder, port=port: write_batches(folder, connect(port), 0, 2))
        for message in announced(control):
            assert_complete(folder, BufferReader(RunDir(folder), CONFIG).manifest(message))
        again, _ = Control.serve("127.0.0.1", 2, "t")
        write_batches(folder, again, 0, 3)
        assert [message.step for message in announced(again)] == [1, 2, 3]
        for manifest in committed(folder / "buffer"):
            assert_complete(folder, manifest)
        assert not temporaries(folder)
        calls += 1
    # 2 batches of 3 chunks and a manifest, each at least a write, two fsyncs and a rename.
    assert calls > 2 * 4 * 4


def test_a_crash_before_every_single_deletion(tmp_path: Path) -> None:
    for discard in (False, True):
        calls = 0
        finished = False
        while not finished:
            folder = tmp_path / f"crash-{discard}-{calls}"
            folder.mkdir()
            control, _ = Control.serve("127.0.0.1", 1, "t")
            write_batches(folder, control, 0, 4)
            if discard:
                BufferReader(RunDir(folder), CONFIG).collect(2)
            loose = BufferWriter(RunDir(folder), control, CONFIG, experts=300)
            loose.resume(2)
            for index in (20, 21):
                loose.add(make_group(index, experts=300))

            def delete(folder: Path = folder, discard: bool = discard) -> object:
                if not discard:
                    return BufferReader(RunDir(folder), CONFIG).collect(3)
                control, _ = Control.serve("127.0.0.1", 2, "t")
                return BufferWriter(RunDir(folder), control, CONFIG, experts=300).resume(1)

            finished = crash_after(calls, delete)
            again, _ = Control.serve("127.0.0.1", 3, "t")
            done = 1 if discard else 3
            write_batches(folder, again, done, 6)
            assert [message.step for message in announced(again)] == list(range(done + 1, 7))
            for manifest in committed(folder / "buffer"):
                assert_complete(folder, manifest)
            calls += 1
        assert calls > 4
