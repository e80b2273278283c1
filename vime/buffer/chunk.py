"""A chunk: some prompt groups in one immutable file, of which a reader touches only the samples that it asks for.

The arrays of all samples lie one after the other in flat tensors; offsets say where each sample's rows begin. Each
sample has checksums over all its arrays, so that a damaged file is an error and never a wrong sample. A chunk is mostly
routed experts: a sample's lie layer by layer, each with a checksum of its own, and a pipeline stage reads its layers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, TypeAdapter

from vime.buffer.sample import Group, Sample
from vime.buffer.tensors import Array, Flat, encode_tensors, map_tensors, raw_bytes
from vime.config.section import Frozen
from vime.errors import BufferFault
from vime.run.files import commit

FORMAT = "vime-chunk-2"
_RAGGED = {
    "token_offsets": "token_ids",
    "response_offsets": "loss_mask",
    "version_offsets": "versions",
    "route_offsets": "routed_experts",
    "json_offsets": "json",
}
"""Offsets [N + 1] of N samples, and the flat tensor they divide. The logprobs are divided like `loss_mask`."""
_TEACHER = "teacher_logprobs"
"""The one tensor that a chunk may be without."""
_SHAPES: dict[str, tuple[str, tuple[int | None, ...]]] = {
    **dict.fromkeys(_RAGGED, ("<i8", ())),
    "route_sums": ("<u8", (None,)),
    "token_ids": ("<i4", ()),
    "rollout_logprobs": ("<f4", ()),
    _TEACHER: ("<f4", ()),
    "versions": ("<i4", (2,)),
    "rewards": ("<f4", ()),
    "checksums": ("<u4", ()),
    "loss_mask": ("u1", ()),
    "has_routes": ("u1", ()),
    "json": ("u1", ()),
    "groups": ("u1", ()),
    "routed_experts": ("", (None,)),
}
"""Type and row shape of every tensor. Routes have the type of the expert count and a row of top-k for each layer of a
sample and each of its positions, in this order; their sums have a row of layers for each sample."""


class ChunkInfo(Frozen):
    """Name and size of a committed chunk."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    bytes: int = Field(ge=1)


class GroupRange(Frozen):
    """Which samples of a chunk are one group's: `count` of them from `first` on."""

    uid: str
    index: int
    first: int
    count: int = Field(ge=1)


_GROUPS = TypeAdapter(list[GroupRange])
_DAMAGED = "the checksum of its data is wrong"


def route_dtype(experts: int) -> np.dtype[Any]:
    """The narrowest integer type that holds expert ids 0 to `experts` - 1."""
    if experts < 1:
        raise ValueError(f"a model with routes has at least 1 expert, not {experts}")
    return np.dtype("u1" if experts <= 1 << 8 else "<u2" if experts <= 1 << 16 else "<i4")


def write_chunk(folder: Path, name: str, groups: Sequence[Group], experts: int | None = None) -> ChunkInfo:
    """Commit `groups` as the file `name` of `folder`. Raises like `encode_chunk`, and BufferFault like `commit`."""
    return ChunkInfo(name=name, bytes=commit(folder / name, encode_chunk(groups, experts)))


def encode_chunk(groups: Sequence[Group], experts: int | None = None) -> list[bytes | memoryview]:
    """The content of a chunk of `groups`, in pieces. `experts`: the model's expert count, needed when there are routes.

    Raises ValueError when there is no group, expert ids are out of range, routes differ in (layers, top-k) or only some
    samples have a teacher's logprobs.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        raise ValueError("a chunk without groups has no samples")
    routes = _routes(samples, experts)
    teacher = [s.teacher_logprobs for s in samples if s.teacher_logprobs is not None]
    if len(teacher) not in (0, len(samples)):
        raise ValueError(f"{len(teacher)} of the {len(samples)} samples of a chunk have a teacher's logprobs")
    texts = [_json(_facts(sample)) for sample in samples]
    rewards = np.array([s.reward for s in samples], "<f4")
    has_routes = np.array([s.routed_experts is not None for s in samples], "u1")
    firsts = list(accumulate((len(group.samples) for group in groups), initial=0))
    ranges = _json(
        [
            {"uid": group.uid, "index": group.index, "first": first, "count": len(group.samples)}
            for group, first in zip(groups, firsts, strict=False)
        ]
    )
    checksums = [
        _checksum(s.token_ids, s.loss_mask, s.rollout_logprobs, s.versions, reward, routed, text, s.teacher_logprobs)
        for s, reward, routed, text in zip(samples, rewards, has_routes, texts, strict=True)
    ]
    arrays: dict[str, list[Array]] = {
        "token_ids": [s.token_ids for s in samples],
        "rollout_logprobs": [s.rollout_logprobs for s in samples],
        "versions": [s.versions for s in samples],
        "loss_mask": [s.loss_mask for s in samples],
        "routed_experts": [ids.reshape(len(ids) * ids.shape[1], ids.shape[2]) for ids in routes],
        "json": [np.frombuffer(text, "u1") for text in texts],
        "rewards": [rewards],
        "has_routes": [has_routes],
        "checksums": [np.array(checksums, "<u4")],
        "route_sums": [np.array([[_word_sum(layer) for layer in ids] for ids in routes], "<u8")],
        "groups": [np.frombuffer(ranges, "u1")],
    }
    if teacher:
        arrays[_TEACHER] = teacher
    for offsets, flat in _RAGGED.items():
        arrays[offsets] = [np.array(list(accumulate(map(len, arrays[flat]), initial=0)), "<i8")]
    tensors = {
        key: Flat(np.dtype(_SHAPES[key][0] or routes[0].dtype), value[0].shape[1:], value)
        for key, value in arrays.items()
    }
    metadata = {"format": FORMAT, "experts": str(experts or 0), "groups_checksum": str(zlib.crc32(ranges))}
    return encode_tensors(tensors, metadata)


@dataclass(frozen=True)
class Chunk:
    """A chunk file mapped into memory. The arrays of its samples are views of the mapping: they take no memory of their
    own, may be written to (the file does not change), and must not be used after another node deleted the file."""

    path: Path
    experts: int
    """The model's expert count; 0 when it was not given, so without routes."""
    tensors: dict[str, Array]
    """The file's tensors by name, as views."""
    groups: tuple[GroupRange, ...]

    @classmethod
    def open(cls, path: Path) -> Chunk:
        """Map `path`. Raises BufferFault naming it when it is missing, truncated or not a chunk."""
        with _naming(path):
            metadata, tensors = map_tensors(path)
            if metadata["format"] != FORMAT:
                raise ValueError(f"its format is {metadata['format']!r}, not {FORMAT}")
            experts = int(metadata["experts"])
            _check_tensors(tensors, experts)
            text = tensors["groups"].tobytes()
            if zlib.crc32(text) != int(metadata["groups_checksum"]):
                raise ValueError("the checksum of its groups is wrong")
            groups = _GROUPS.validate_json(text)
            bounds = list(accumulate((group.count for group in groups), initial=0))
            if [group.first for group in groups] != bounds[:-1] or bounds[-1] != len(tensors["rewards"]):
                raise ValueError("its groups do not cover its samples")
            return cls(path, experts, tensors, tuple(groups))

    def __len__(self) -> int:
        return len(self.tensors["rewards"])

    def sample(self, index: int, layers: Sequence[int] | None = None) -> Sample:
        """Sample `index`, checked. `layers`, in rising order: only their routes, of others no byte is read.

        Raises BufferFault when its data are damaged or it has no such layer, IndexError when there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has {len(self)} samples, no sample {index}")
        with _naming(self.path, f"sample {index}: "):
            token_ids, versions = self._rows("token_offsets", index), self._rows("version_offsets", index)
            loss_mask = self._rows("response_offsets", index)
            logprobs = self._rows("response_offsets", index, "rollout_logprobs")
            teacher = self._rows("response_offsets", index, _TEACHER) if _TEACHER in self.tensors else None
            text = self._rows("json_offsets", index).tobytes()
            reward = self.tensors["rewards"][index : index + 1]
            has_routes = self.tensors["has_routes"][index : index + 1]
            checksum = _checksum(token_ids, loss_mask, logprobs, versions, reward, has_routes, text, teacher)
            routes = self._routes(index, layers) if has_routes[0] else None
            if checksum != self.tensors["checksums"][index]:
                raise ValueError(_DAMAGED)
            facts = json.loads(text)
            return Sample(
                token_ids=token_ids,
                prompt_length=len(token_ids) - len(loss_mask),
                loss_mask=loss_mask,
                rollout_logprobs=logprobs,
                versions=versions,
                reward=float(reward[0]),
                finish_reason=facts["finish_reason"],
                routed_experts=routes,
                teacher_logprobs=teacher,
                first_route=facts.get("first_route", 0),
                metadata=facts["metadata"],
            )

    def _routes(self, index: int, layers: Sequence[int] | None) -> Array:
        """Expert ids [layers, positions, top-k] of a sample: views of the file where the layers follow each other."""
        sums, rows = self.tensors["route_sums"][index], self._rows("route_offsets", index)
        every = rows.reshape(len(sums), -1, rows.shape[1])
        chosen = list(range(len(sums)) if layers is None else layers)
        if [_word_sum(every[layer]) for layer in chosen] != [int(sums[layer]) for layer in chosen]:
            raise ValueError(_DAMAGED)
        if chosen and chosen == list(range(chosen[0], chosen[-1] + 1)):
            return every[chosen[0] : chosen[-1] + 1]
        return every[np.array(chosen, int)]

    def _rows(self, offsets: str, index: int, flat: str | None = None) -> Array:
        begin, end = self.tensors[offsets][index : index + 2].tolist()
        return self.tensors[flat or _RAGGED[offsets]][begin:end]


def read_samples(path: Path, indices: Sequence[int], layers: Sequence[int] | None = None) -> list[Sample]:
    """The samples of a chunk at `indices`, in that order; touches no others. Raises like `Chunk`."""
    chunk = Chunk.open(path)
    return [chunk.sample(index, layers) for index in indices]


def _routes(samples: Sequence[Sample], experts: int | None) -> list[Array]:
    """Each sample's expert ids [layers, positions, top-k] in the narrowest type; no positions without routes."""
    shapes = {s.routed_experts.shape[::2] for s in samples if s.routed_experts is not None}
    if len(shapes) > 1:
        raise ValueError(f"samples of one chunk have routes of different (layers, top-k): {sorted(shapes)}")
    if shapes and experts is None:
        raise ValueError("samples carry routed experts, but the model's expert count was not given")
    layers, top_k = shapes.pop() if shapes else (0, 0)
    dtype = route_dtype(experts or 1)
    routes: list[Array] = []
    for sample in samples:
        ids = sample.routed_experts
        if ids is None:
            ids = np.empty((layers, 0, top_k), dtype)
        elif ids.size and experts is not None:
            # The comparison with the type's own largest value saves a pass over uint8 ids of 256 experts.
            lowest = int(ids.min()) if ids.dtype.kind == "i" else 0
            highest = int(ids.max()) if np.iinfo(ids.dtype).max >= experts else 0
            if lowest < 0 or highest >= experts:
                raise ValueError(f"expert id {lowest if lowest < 0 else highest} is out of range for {experts} experts")
        routes.append(np.ascontiguousarray(ids, dtype))
    return routes


def _check_tensors(tensors: dict[str, Array], experts: int) -> None:
    if tensors.keys() | {_TEACHER} != _SHAPES.keys():
        raise ValueError(f"its tensors are {sorted(tensors)}")
    for name, tensor in tensors.items():
        dtype, row = _SHAPES[name]
        fits = len(tensor.shape) == len(row) + 1
        fits = fits and all(want in (None, seen) for seen, want in zip(tensor.shape[1:], row, strict=True))
        if not fits or tensor.dtype != (dtype or route_dtype(experts or 1)):
            raise ValueError(f"{name} is {tensor.dtype}{list(tensor.shape)}")
    count = len(tensors["rewards"])
    if {len(tensors[name]) for name in ("checksums", "has_routes", "route_sums")} != {count}:
        raise ValueError("its tensors disagree on the number of samples")
    for name, flat in _RAGGED.items():
        offsets = tensors[name]
        rises = len(offsets) == count + 1 and not np.any(offsets[1:] < offsets[:-1])
        if not rises or offsets[0] != 0 or offsets[-1] != len(tensors[flat]):
            raise ValueError(f"{name} do not divide {flat}")
    for name in ("rollout_logprobs", _TEACHER):
        if name in tensors and len(tensors[name]) != len(tensors["loss_mask"]):
            raise ValueError(f"{name} and loss_mask differ in length")


def _checksum(*arrays: Array | bytes | None) -> int:
    value = 0
    for array in arrays:
        if array is None:
            continue
        value = zlib.crc32(array if isinstance(array, bytes) else raw_bytes(array).data, value)
    return value


def _word_sum(array: Array) -> int:
    """Sum of the bytes as 64-bit words, modulo 2**64. Routes are most of a chunk, and this runs at memory speed."""
    raw = raw_bytes(array)
    whole = len(raw) // 8 * 8
    rest = int.from_bytes(raw[whole:].tobytes(), "little")
    return (int(raw[:whole].view("<u8").sum(dtype=np.uint64)) + rest) % (1 << 64)


def _facts(sample: Sample) -> dict[str, Any]:
    facts: dict[str, Any] = {"finish_reason": sample.finish_reason, "metadata": sample.metadata}
    return facts | ({"first_route": sample.first_route} if sample.first_route else {})


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


@contextmanager
def _naming(path: Path, what: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BufferFault(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise BufferFault(f"{path} does not read as a chunk: {what}{error}") from error
