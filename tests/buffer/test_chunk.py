"""Chunks: what goes in comes out, damage is an error, and reading a share touches a share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.buffer.made import assert_same, group_lists, make_group, make_sample
from vime.buffer.chunk import Chunk, read_samples, write_chunk
from vime.buffer.sample import Group, Sample
from vime.errors import BufferFault

QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def flat(groups: list[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


@QUICK
@given(made=group_lists())
def test_any_mixture_survives_exactly(tmp_path: Path, made: tuple[list[Group], int | None]) -> None:
    groups, experts = made
    info = write_chunk(tmp_path, "c.safetensors", groups, experts)
    assert info.bytes == (tmp_path / info.name).stat().st_size
    chunk = Chunk.open(tmp_path / info.name)
    assert chunk.experts == (experts or 0)
    assert [(g.uid, g.index, g.count) for g in chunk.groups] == [(g.uid, g.index, len(g.samples)) for g in groups]
    wanted = flat(groups)
    assert len(chunk) == len(wanted)
    for index, sample in enumerate(wanted):
        assert_same(chunk.sample(index), sample)


def test_samples_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    groups = [make_group(index, 3) for index in range(4)]
    write_chunk(tmp_path, "c", groups)
    for seen, wanted in zip(
        read_samples(tmp_path / "c", [7, 0, 7, 11]), [flat(groups)[i] for i in (7, 0, 7, 11)], strict=True
    ):
        assert_same(seen, wanted)
    with pytest.raises(IndexError, match="12 samples, no sample 12"):
        read_samples(tmp_path / "c", [12])


def test_the_arrays_are_aligned_writable_and_leave_the_file_alone(tmp_path: Path) -> None:
    write_chunk(tmp_path, "c", [make_group(1, 3, experts=300)], 300)
    before = (tmp_path / "c").read_bytes()
    sample = Chunk.open(tmp_path / "c").sample(1)
    for array in (sample.token_ids, sample.loss_mask, sample.rollout_logprobs, sample.versions, sample.routed_experts):
        assert array is not None
        assert array.flags.aligned
        assert array.flags.writeable
        array[...] = 1
    assert (tmp_path / "c").read_bytes() == before


def test_the_safetensors_package_reads_the_file(tmp_path: Path) -> None:
    groups = [make_group(3, 3, experts=511)]
    write_chunk(tmp_path, "c.safetensors", groups, 511)
    with safe_open(tmp_path / "c.safetensors", framework="np") as file:
        assert file.metadata()["format"] == "vime-chunk-2"
        token_ids, routes = file.get_tensor("token_ids"), file.get_tensor("routed_experts")
    assert (token_ids == np.concatenate([s.token_ids for s in flat(groups)])).all()
    assert (routes == np.concatenate([s.routed_experts.reshape(-1, 2) for s in flat(groups)])).all()


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(128, "u1"), (255, "u1"), (256, "u1"), (257, "u2"), (512, "u2"), (65536, "u2"), (65537, "i4")],
)
def test_case_14_expert_ids_survive_in_the_narrowest_type(tmp_path: Path, experts: int, dtype: str) -> None:
    ids = [i for i in (0, 127, 128, 255, 256, 511, 65535, 65536, experts - 1) if i < experts]
    routes = np.resize(ids, (3, len(ids), 2)).astype(np.int64)
    sample = make_sample(np.random.default_rng(0), 1, len(ids), routed_experts=routes)
    write_chunk(tmp_path, "c", [Group("g", 0, (sample,))], experts)
    chunk = Chunk.open(tmp_path / "c")
    seen = chunk.sample(0).routed_experts
    assert seen is not None
    assert seen.dtype == np.dtype(dtype)
    assert (seen == routes).all()
    assert chunk.experts == experts


@pytest.mark.parametrize(
    ("wrong", "held", "experts"),
    [
        (128, "u1", 128),
        (255, "u1", 255),
        (256, "u2", 256),
        (511, "i4", 511),
        (-1, "i8", 64),
        (-1, "i1", 256),
        (70000, "i4", 65537),
    ],
)
def test_case_14_an_id_out_of_range_is_refused(tmp_path: Path, wrong: int, held: str, experts: int) -> None:
    routes = np.zeros((3, 4, 2), held)
    routes[2, 1, 0] = wrong
    sample = make_sample(np.random.default_rng(0), 2, 3, routed_experts=routes)
    with pytest.raises(ValueError, match=f"expert id {wrong} is out of range for {experts} experts"):
        write_chunk(tmp_path, "c", [Group("g", 0, (sample,))], experts)
    assert list(tmp_path.iterdir()) == []


def test_routes_need_an_expert_count_and_one_shape(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    one = make_sample(rng, 2, 2, routed_experts=np.zeros((2, 3, 2), np.uint8))
    other = make_sample(rng, 2, 2, routed_experts=np.zeros((4, 3, 2), np.uint8))
    with pytest.raises(ValueError, match="expert count was not given"):
        write_chunk(tmp_path, "c", [Group("g", 0, (one,))])
    with pytest.raises(ValueError, match=r"different \(layers, top-k\)"):
        write_chunk(tmp_path, "c", [Group("g", 0, (one, other))], 8)
    with pytest.raises(ValueError, match="no samples"):
        write_chunk(tmp_path, "c", [])


def test_a_teacher_judges_all_samples_of_a_chunk_or_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    without, judged = make_sample(rng, 2, 2), make_sample(rng, 2, 3, teacher=True)
    with pytest.raises(ValueError, match="1 of the 2 samples of a chunk have a teacher's logprobs"):
        write_chunk(tmp_path, "c", [Group("g", 0, (without, judged))])
    write_chunk(tmp_path, "without", [Group("g", 0, (without,))])
    with safe_open(tmp_path / "without", framework="np") as file:
        assert "teacher_logprobs" not in list(file.keys()), "what is absent takes no byte"


def test_the_routes_of_some_layers_are_read_alone(tmp_path: Path) -> None:
    samples = flat([make_group(index, 3, experts=300) for index in range(2)])
    write_chunk(tmp_path, "c", [Group("g", 0, tuple(samples))], 300)
    chunk = Chunk.open(tmp_path / "c")
    for layers in ([], [1], [0, 1], [0, 2], [0, 1, 2]):
        for index, sample in enumerate(samples):
            assert sample.routed_experts is not None
            assert_same(chunk.sample(index, layers), replace(sample, routed_experts=sample.routed_experts[layers]))
    with pytest.raises(BufferFault, match="sample 0: index 3 is out of bounds"):
        chunk.sample(0, [3])


def test_damage_in_a_layer_is_seen_by_those_who_read_it(tmp_path: Path) -> None:
    routes = np.arange(3 * 40 * 2, dtype=np.uint8).reshape(3, 40, 2)
    sample = make_sample(np.random.default_rng(0), 20, 21, routed_experts=routes)
    write_chunk(tmp_path, "c", [Group("g", 0, (sample,))], 256)
    content = bytearray((tmp_path / "c").read_bytes())
    content[content.index(routes[1].tobytes()) + 7] ^= 1
    (tmp_path / "c").write_bytes(content)
    chunk = Chunk.open(tmp_path / "c")
    for layers in ([1], [1, 2], None):
        with pytest.raises(BufferFault, match="sample 0: the checksum of its data is wrong"):
            chunk.sample(0, layers)
    assert (chunk.sample(0, [0, 2]).routed_experts == routes[[0, 2]]).all()


@pytest.fixture(params=[False, True], ids=["plain", "judged"])
def whole(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, list[Sample]]:
    groups = [make_group(index, 2, experts=300, teacher=request.param) for index in range(3)]
    write_chunk(tmp_path, "c.safetensors", groups, 300)
    return tmp_path / "c.safetensors", flat(groups)


@QUICK
@given(data=st.data())
def test_a_truncated_file_is_an_error_that_names_it(whole: tuple[Path, list[Sample]], data: st.DataObject) -> None:
    path, _ = whole
    content = path.read_bytes()
    torn = path.with_name("torn")
    torn.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(BufferFault, match="torn does not read as a chunk"):
        Chunk.open(torn)


@settings(QUICK, max_examples=300)
@given(data=st.data())
def test_a_damaged_file_is_an_error_and_never_a_wrong_sample(
    whole: tuple[Path, list[Sample]], data: st.DataObject
) -> None:
    path, wanted = whole
    content = bytearray(path.read_bytes())
    where, length = data.draw(st.integers(0, len(content) - 1)), data.draw(st.sampled_from([1, 1, 8, 64, 4096]))
    if data.draw(st.booleans()):
        content[where] ^= 1 << data.draw(st.integers(0, 7))
    else:
        content[where : where + length] = bytes(len(content[where : where + length]))
    damaged = path.with_name("damaged")
    damaged.write_bytes(content)
    seen: list[Sample] = []
    # Not every byte matters: the padding of the header may become anything that JSON skips.
    with contextlib.suppress(BufferFault):
        seen = read_samples(damaged, range(len(wanted)))
    for one, other in zip(seen, wanted, strict=bool(seen)):
        assert_same(one, other)


def test_damage_in_one_sample_leaves_the_others_readable(whole: tuple[Path, list[Sample]]) -> None:
    path, wanted = whole
    content = bytearray(path.read_bytes())
    ids = wanted[2].token_ids.tobytes()
    content[content.index(ids)] ^= 1
    path.write_bytes(content)
    chunk = Chunk.open(path)
    with pytest.raises(BufferFault, match="sample 2: the checksum of its data is wrong"):
        chunk.sample(2)
    assert_same(chunk.sample(3), wanted[3])


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    with pytest.raises(BufferFault, match=r"cannot read .*nothing: No such file"):
        Chunk.open(tmp_path / "nothing")
    (tmp_path / "huge").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(BufferFault, match="huge does not read as a chunk"):
        Chunk.open(tmp_path / "huge")
    (tmp_path / "pickle").write_bytes(b"\x80\x04\x95" + bytes(100))
    with pytest.raises(BufferFault, match="pickle does not read as a chunk"):
        Chunk.open(tmp_path / "pickle")


def test_a_failed_write_leaves_no_file_and_says_why(tmp_path: Path) -> None:
    # A process may only write files of 100 kB: the same refusal in the middle of a write as a full disk.
    code = f"""
import resource
from pathlib import Path
import numpy as np
from tests.buffer.made import make_sample
from vime.buffer.chunk import write_chunk
from vime.errors import BufferFault
from vime.buffer.sample import Group
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
big = make_sample(np.random.default_rng(0), 10, 100_000)
try:
    write_chunk(Path({str(tmp_path)!r}), "c.safetensors", [Group("g", 0, (big,))])
except BufferFault as fault:
    print(fault)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert f"cannot write {tmp_path}/c.safetensors: File too large after 100,000 bytes" in said
    assert "bytes are free there" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stages", [1, 4])
def test_a_reader_touches_its_own_samples_and_layers(tmp_path: Path, stages: int) -> None:
    rng = np.random.default_rng(0)
    # 64 samples of 1 MiB, nearly all of it routes: 512 tokens, 128 layers, top-8 and two bytes an id.
    samples = tuple(
        make_sample(rng, 12, 501, routed_experts=rng.integers(0, 300, (128, 512, 8)).astype(np.uint16))
        for _ in range(64)
    )
    write_chunk(tmp_path, "c", [Group("g", 0, samples)], 300)
    code = f"""
from pathlib import Path
from vime.buffer.chunk import read_samples
def resident():
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Rss:"))
path = Path({str(tmp_path / "c")!r})
read_samples(path, [0])
before = resident()
samples = read_samples(path, range(3, 64, 8), range({128 // stages * (stages - 1)}, 128))
print(resident() - before, sum(int(s.routed_experts.sum()) for s in samples))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    touched, total = map(int, said.split())
    share = (tmp_path / "c").stat().st_size / 8 / stages
    own = [s.routed_experts[128 // stages * (stages - 1) :] for s in samples[3::8] if s.routed_experts is not None]
    assert total == sum(int(routes.sum()) for routes in own)
    # The kernel maps 64 KiB around each page that is touched: of the tokens, logprobs, masks and routes of 8 samples.
    assert 0.8 * share < touched < 1.2 * share + 8 * 4 * (1 << 16)
