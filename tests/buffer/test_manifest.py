"""Batch manifests: validation, padding (case 5) and collection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.buffer.made import make_group, make_sample
from vime.buffer.chunk import ChunkInfo
from vime.buffer.manifest import Entry, Manifest, collect, committed, entries, read_manifest
from vime.buffer.sample import Group
from vime.errors import BufferFault


def make_manifest(step: int, chunks: list[str]) -> Manifest:
    samples = tuple(entry for name in chunks for entry in entries(name, [make_group(step)]))
    infos = tuple(ChunkInfo(name=name, bytes=10) for name in chunks)
    return Manifest(
        step=step, version=step - 1, chunks=infos, samples=samples, metrics={"m": 0.5}, cursor={"at": [step]}
    )


def commit_manifest(buffer: Path, manifest: Manifest) -> None:
    for name in ("chunks", "batches"):
        (buffer / name).mkdir(exist_ok=True)
    for chunk in manifest.chunks:
        (buffer / "chunks" / chunk.name).write_bytes(b"x" * chunk.bytes)
    (buffer / "batches" / manifest.file_name).write_bytes(manifest.to_bytes())


def test_entries_say_what_balancing_needs() -> None:
    rng = np.random.default_rng(0)
    sample = make_sample(
        rng, 3, 4,
        loss_mask=np.array([1, 0, 1, 1], np.uint8), reward=0.35,
    )  # fmt: skip
    group = Group("p", 17, (make_sample(rng, 5, 0), sample))
    first, second = entries("c", [group])
    assert (first.tokens, first.response_tokens, first.masked_in) == (5, 0, 0)
    assert second == Entry(
        chunk="c", index=1, group=17, tokens=7, response_tokens=4, masked_in=3,
        reward=float(np.float32(0.35)),
    )  # fmt: skip


def test_bytes_round_trip() -> None:
    manifest = make_manifest(3, ["a", "b"])
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 0}, "step"),
        ({"extra": 1}, "extra"),
        ({"chunks": [{"name": "../../etc/passwd", "bytes": 1}]}, "chunks.0.name"),
        ({"chunks": []}, "samples lie in a"),
        ({"samples": None}, "samples"),
    ],
)
def test_a_manifest_of_another_shape_is_refused(changes: dict[str, Any], words: str) -> None:
    value = json.loads(make_manifest(3, ["a"]).to_bytes())
    with pytest.raises(BufferFault, match=f"the origin does not read as a manifest: .*{words}"):
        Manifest.from_bytes(json.dumps(value | changes).encode(), "the origin")


def test_a_manifest_of_a_run_that_began_with_samples_of_weight_1_is_read() -> None:
    manifest = make_manifest(3, ["a"])
    value = json.loads(manifest.to_bytes())
    for sample in value["samples"]:
        sample["weight"] = 1.0
    assert Manifest.from_bytes(json.dumps(value).encode(), "the origin") == manifest
    value["samples"][0]["weight"] = 0.5
    with pytest.raises(BufferFault, match="weight"):
        Manifest.from_bytes(json.dumps(value).encode(), "the origin")


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_torn_manifest_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "step_3.json"
    path.write_bytes(make_manifest(3, ["a"]).to_bytes()[:cut])
    with pytest.raises(BufferFault, match=r"step_3\.json does not read as a manifest"):
        read_manifest(path)


def test_a_manifest_under_another_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step_4.json"
    path.write_bytes(make_manifest(3, ["a"]).to_bytes())
    with pytest.raises(BufferFault, match=r"step_4\.json is the manifest of step 3"):
        read_manifest(path)


def test_collect_keeps_chunks_that_a_later_batch_needs(tmp_path: Path) -> None:
    for step, chunks in ((9, ["a", "b"]), (10, ["b", "c"]), (11, ["d"])):
        commit_manifest(tmp_path, make_manifest(step, chunks))
    (tmp_path / "chunks" / "loose").write_bytes(b"not in a batch yet")
    assert [m.step for m in committed(tmp_path)] == [9, 10, 11]
    assert collect(tmp_path, 9) == [9]
    assert sorted(p.name for p in (tmp_path / "chunks").iterdir()) == ["b", "c", "d", "loose"]
    assert collect(tmp_path, 10) == [10]
    assert sorted(p.name for p in (tmp_path / "chunks").iterdir()) == ["d", "loose"]
    assert collect(tmp_path, 10) == []
    assert [m.step for m in committed(tmp_path)] == [11]


def test_a_buffer_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    assert committed(tmp_path / "buffer") == []
    assert collect(tmp_path / "buffer", 5) == []
