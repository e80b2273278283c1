"""A chunk: some prompt groups in one immutable safetensors file, of which a reader touches only the samples it asks for.

The arrays of all samples lie one after the other in flat tensors; offsets say where each sample's part begins. Tensors
come in falling order of item size, so every array is aligned in the mapped file. Each sample has a checksum over all its
parts, so that a damaged file is an error and never a wrong sample.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from vime.buffer.errors import BufferFault
from vime.buffer.files import commit
from vime.buffer.sample import Group, Sample

FORMAT = "vime-chunk-1"
Array = NDArray[Any]
_DTYPES = {
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_RAGGED = ("token", "response", "version", "route", "json")
_FIXED = {f"{name}_offsets": "I64" for name in _RAGGED} | {
    "route_sums": "U64",
    "token_ids": "I32",
    "rollout_logprobs": "F32",
    "versions": "I32",
    "rewards": "F32",
    "checksums": "U32",
    "loss_mask": "U8",
    "has_routes": "U8",
    "json": "U8",
    "groups": "U8",
}


class ChunkInfo(BaseModel):
    """Name and size of a committed chunk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    bytes: int = Field(ge=1)


class GroupRange(BaseModel):
    """Which samples of a chunk are one group's: `count` of them from `first` on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uid: str
    index: int
    first: int
    count: int


_GROUPS = TypeAdapter(list[GroupRange])


def route_dtype(experts: int) -> np.dtype[Any]:
    """The narrowest integer type that holds expert ids 0 to `experts` - 1."""
    if experts < 1:
        raise ValueError(f"a model with routes has at least 1 expert, not {experts}")
    return np.dtype("u1" if experts <= 1 << 8 else "<u2" if experts <= 1 << 16 else "<i4")


def write_chunk(folder: Path, name: str, groups: Sequence[Group], experts: int | None = None) -> ChunkInfo:
    """Commit `groups` as the file `name` of `folder`. `experts` is the model's expert count, needed when there are routes.

    Raises ValueError when a sample's expert ids are out of range or its routes have another shape than the others', and
    BufferFault when the file cannot be written.
    """
    samples = [sample for group in groups for sample in group.samples]
    routes, shape = _routes(samples, experts)
    texts = [_json({"finish_reason": s.finish_reason, "metadata": s.metadata}) for s in samples]
    firsts = accumulate((len(group.samples) for group in groups), initial=0)
    ranges = [
        GroupRange(uid=g.uid, index=g.index, first=first, count=len(g.samples))
        for g, first in zip(groups, firsts, strict=False)
    ]
    ranges_text = _json([r.model_dump() for r in ranges])
    lengths = {
        "token": [len(s.token_ids) for s in samples],
        "response": [s.response_length for s in samples],
        "version": [len(s.versions) for s in samples],
        "route": [len(r) for r in routes],
        "json": [len(text) for text in texts],
    }
    rewards = np.array([s.reward for s in samples], np.float32)
    has_routes = np.array([s.routed_experts is not None for s in samples], np.uint8)
    checksums = [
        _checksum(s.token_ids, s.loss_mask, s.rollout_logprobs, s.versions, rewards[i : i + 1], has_routes[i : i + 1], text)
        for i, (s, text) in enumerate(zip(samples, texts, strict=True))
    ]
    tensors: dict[str, tuple[tuple[int, ...], np.dtype[Any], list[Array]]] = {}

    def tensor(key: str, parts: list[Array], shape: tuple[int, ...] = ()) -> None:
        tensors[key] = ((sum(len(part) for part in parts), *shape), parts[0].dtype, parts)

    for ragged, sizes in lengths.items():
        tensor(f"{ragged}_offsets", [np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)])
    tensor("route_sums", [np.array([_word_sum(r) for r in routes], np.uint64)])
    tensor("token_ids", [s.token_ids for s in samples] or [np.empty(0, np.int32)])
    tensor("rollout_logprobs", [s.rollout_logprobs for s in samples] or [np.empty(0, np.float32)])
    tensor("versions", [s.versions for s in samples] or [np.empty((0, 2), np.int32)], (2,))
    tensor("rewards", [rewards])
    tensor("checksums", [np.array(checksums, np.uint32)])
    tensor("loss_mask", [s.loss_mask for s in samples] or [np.empty(0, np.uint8)])
    tensor("has_routes", [has_routes])
    tensor("json", [np.frombuffer(b"".join(texts), np.uint8)])
    tensor("groups", [np.frombuffer(ranges_text, np.uint8)])
    tensor("routed_experts", routes or [np.empty((0, *shape), np.uint8)], shape)
    ordered = sorted(tensors.items(), key=lambda item: -item[1][1].itemsize)
    header: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "experts": str(experts or 0), "groups_checksum": str(zlib.crc32(ranges_text))}
    }
    end = 0
    for key, (dims, dtype, _) in ordered:
        begin, end = end, end + int(np.prod(dims, dtype=np.int64)) * dtype.itemsize
        header[key] = {"dtype": _NAMES[dtype], "shape": list(dims), "data_offsets": [begin, end]}
    text = _json(header)
    text += b" " * (-len(text) % 8)
    data = (_bytes(part) for _, (_, _, parts) in ordered for part in _joined(parts))
    size = commit(folder / name, _chain(len(text).to_bytes(8, "little") + text, data))
    return ChunkInfo(name=name, bytes=size)


@dataclass(frozen=True)
class Chunk:
    """A chunk file mapped into memory. Its samples' arrays are views of the mapping: they cost no memory of their own,
    may be written to (the file does not change), and must not be used after the file was deleted by another node."""

    path: Path
    experts: int
    """The model's expert count, 0 when it was not given."""
    tensors: dict[str, Array]
    """The file's tensors by name, as views."""
    groups: tuple[GroupRange, ...]

    @classmethod
    def open(cls, path: Path) -> Chunk:
        """Map `path`. Raises BufferFault naming it when it is missing, truncated or not a chunk."""
        with _naming(path):
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                if size < 8:
                    raise ValueError(f"it has {size} bytes")
                # A private mapping gives writable arrays, which torch wants, of a file that cannot change.
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
            metadata, tensors = _map_tensors(mapped, size)
            count = len(tensors["rewards"])
            for name in ("checksums", "has_routes", "route_sums"):
                if len(tensors[name]) != count:
                    raise ValueError(f"{name} is not one a sample")
            for name, flat in zip(_RAGGED, ("token_ids", "loss_mask", "versions", "routed_experts", "json"), strict=True):
                offsets = tensors[f"{name}_offsets"]
                if len(offsets) != count + 1 or offsets[0] or offsets[-1] != len(tensors[flat]) or np.any(np.diff(offsets) < 0):
                    raise ValueError(f"{name}_offsets do not describe {flat}")
            if len(tensors["rollout_logprobs"]) != len(tensors["loss_mask"]) or tensors["versions"].shape[1:] != (2,):
                raise ValueError("its tensors do not fit together")
            text = tensors["groups"].tobytes()
            if zlib.crc32(text) != int(metadata["groups_checksum"]):
                raise ValueError("the checksum of its groups is wrong")
            groups = _GROUPS.validate_json(text)
            ends = accumulate((g.count for g in groups), initial=0)
            if [g.first for g in groups] != list(ends)[:-1] or sum(g.count for g in groups) != count:
                raise ValueError("its groups do not cover its samples")
            return cls(path, int(metadata["experts"]), tensors, tuple(groups))

    def __len__(self) -> int:
        return len(self.tensors["rewards"])

    def sample(self, index: int) -> Sample:
        """Sample `index`, checked. Raises BufferFault when its data are damaged, IndexError when there is no such sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has {len(self)} samples, no sample {index}")
        with _naming(self.path, f"sample {index}: "):
            tensors = self.tensors

            def part(ragged: str, flat: str) -> Array:
                begin, end = tensors[f"{ragged}_offsets"][index : index + 2].tolist()
                return tensors[flat][begin:end]

            token_ids, loss_mask = part("token", "token_ids"), part("response", "loss_mask")
            logprobs, versions = part("response", "rollout_logprobs"), part("version", "versions")
            routes, text = part("route", "routed_experts"), part("json", "json").tobytes()
            reward, has_routes = tensors["rewards"][index : index + 1], tensors["has_routes"][index : index + 1]
            expected = int(tensors["checksums"][index]), int(tensors["route_sums"][index])
            if (_checksum(token_ids, loss_mask, logprobs, versions, reward, has_routes, text), _word_sum(routes)) != expected:
                raise ValueError("the checksum of its data is wrong")
            facts = json.loads(text)
            return Sample(
                token_ids=token_ids,
                prompt_length=len(token_ids) - len(loss_mask),
                loss_mask=loss_mask,
                rollout_logprobs=logprobs,
                versions=versions,
                reward=float(reward[0]),
                finish_reason=facts["finish_reason"],
                routed_experts=routes if has_routes[0] else None,
                metadata=facts["metadata"],
            )


def read_samples(path: Path, indices: Sequence[int]) -> list[Sample]:
    """The samples of a chunk at `indices`, in that order, touching no others. Raises like `Chunk.open` and `Chunk.sample`."""
    chunk = Chunk.open(path)
    return [chunk.sample(index) for index in indices]


def _routes(samples: Sequence[Sample], experts: int | None) -> tuple[list[Array], tuple[int, int]]:
    """Each sample's expert ids in the narrowest type (no rows without routes), and the (layers, top-k) they share."""
    shapes = {s.routed_experts.shape[1:] for s in samples if s.routed_experts is not None}
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
            routes.append(np.empty((0, layers, top_k), dtype))
            continue
        assert experts is not None
        if ids.size and np.iinfo(ids.dtype).max >= experts and int(ids.max()) >= experts:
            raise ValueError(f"expert id {int(ids.max())} is out of range for {experts} experts")
        if ids.size and ids.dtype.kind == "i" and int(ids.min()) < 0:
            raise ValueError(f"expert id {int(ids.min())} is out of range for {experts} experts")
        routes.append(np.ascontiguousarray(ids, dtype))
    return routes, (layers, top_k)


def _map_tensors(mapped: mmap.mmap, size: int) -> tuple[dict[str, str], dict[str, Array]]:
    start = 8 + int.from_bytes(mapped[:8], "little")
    if start > size:
        raise ValueError(f"its header ends at byte {start:,} of {size:,}")
    header = json.loads(mapped[8:start])
    metadata: dict[str, str] = header.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise ValueError(f"its format is {metadata['format']!r}, not {FORMAT}")
    if header.keys() != _FIXED.keys() | {"routed_experts"}:
        raise ValueError(f"its tensors are {sorted(header)}")
    tensors: dict[str, Array] = {}
    end = 0
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape = TypeAdapter(list[int]).validate_python(entry["shape"], strict=True)
        dtype = _DTYPES[entry["dtype"]]
        if entry["dtype"] != _FIXED.get(key, entry["dtype"]) or len(shape) != {"versions": 2, "routed_experts": 3}.get(key, 1):
            raise ValueError(f"{key} is {entry['dtype']}{shape}")
        begin, items = end, int(np.prod(shape, dtype=np.int64))
        end = begin + items * dtype.itemsize
        if entry["data_offsets"] != [begin, end] or min(shape) < 0:
            raise ValueError(f"{key} does not lie where its shape says")
        tensors[key] = np.frombuffer(mapped, dtype, items, start + begin).reshape(shape)
    if start + end != size:
        raise ValueError(f"it has {size:,} bytes, its header describes {start + end:,}")
    return metadata, tensors


def _checksum(*parts: Array | bytes) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part if isinstance(part, bytes) else _bytes(part), value)
    return value


def _word_sum(array: Array) -> int:
    """Sum of the bytes taken as 64-bit words, modulo 2**64: routes are most of a chunk, and this runs at memory speed."""
    raw = array.reshape(-1).view(np.uint8)
    whole = len(raw) // 8 * 8
    rest = int.from_bytes(raw[whole:].tobytes(), "little")
    return (int(raw[:whole].view(np.uint64).sum(dtype=np.uint64)) + rest) % (1 << 64)


def _joined(parts: list[Array]) -> list[Array]:
    """Small parts as one, so that a chunk of thousands of samples is not thousands of small writes."""
    return parts if sum(part.nbytes for part in parts) > len(parts) << 16 else [np.concatenate(parts)]


def _bytes(array: Array) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _chain(head: bytes, rest: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    yield head
    yield from rest


@contextmanager
def _naming(path: Path, part: str = "") -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, OSError) as error:
        raise BufferFault(f"{path} does not read as a chunk: {part}{error!r}") from error
