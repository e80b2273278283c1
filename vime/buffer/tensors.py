"""A file of named flat arrays in the safetensors format: written in pieces without joining them, mapped to be read.

The safetensors package copies what it slices and wants each tensor whole to write it. At the size of routed experts
both cost as much as the file itself, and the format is simple: the length of a header (8 bytes), the header in JSON,
the arrays' bytes. Here they come in falling order of item size behind a padded header, so that each is aligned.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Array = NDArray[Any]
_DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SMALL = 1 << 16


@dataclass(frozen=True)
class Flat:
    """An array in pieces one after the other along the first axis. All have the same `dtype` and row `shape`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of one row: () for a vector."""
    pieces: Sequence[Array]

    @property
    def rows(self) -> int:
        """Length of the first axis."""
        return sum(len(piece) for piece in self.pieces)


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    dtype: str
    shape: list[int] = Field(min_length=1, max_length=4)
    data_offsets: list[int] = Field(min_length=2, max_length=2)


_ENTRIES = TypeAdapter(dict[str, _Entry])
_METADATA = TypeAdapter(dict[str, str])


def encode_tensors(tensors: Mapping[str, Flat], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """The content of a file that holds `tensors`, in pieces: large ones are not copied."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, flat in ordered:
        shape = [flat.rows, *flat.shape]
        begin, end = end, end + _bytes(shape, flat.dtype)
        header[name] = {"dtype": _NAMES[flat.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    head = len(text).to_bytes(8, "little") + text
    return [head, *(raw_bytes(piece).data for _, flat in ordered for piece in _joined(flat.pieces))]


def map_tensors(path: Path) -> tuple[dict[str, str], dict[str, Array]]:
    """Map `path`: its metadata, and its arrays as views that read from the file when they are touched.

    The views are writable, without effect on the file. Raises OSError when it cannot be opened, ValueError (or KeyError
    for a dtype) when it is truncated or its header does not describe it.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        # A private mapping gives the writable arrays that torch wants, of a file that nobody may change.
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(mapped[:8], "little")
    if start > size:
        raise ValueError(f"its header ends at byte {start:,} of {size:,}")
    header = json.loads(mapped[8:start])
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    metadata = _METADATA.validate_python(header.pop("__metadata__", None), strict=True)
    tensors: dict[str, Array] = {}
    end = 0
    for name, entry in sorted(_ENTRIES.validate_python(header).items(), key=lambda item: item[1].data_offsets):
        dtype = _DTYPES[entry.dtype]
        if min(entry.shape) < 0:
            raise ValueError(f"{name} has shape {entry.shape}")
        begin, end = end, end + _bytes(entry.shape, dtype)
        if entry.data_offsets != [begin, end] or start + end > size:
            raise ValueError(f"{name} does not lie where its shape says")
        items = (end - begin) // dtype.itemsize
        tensors[name] = np.frombuffer(mapped, dtype, items, start + begin).reshape(entry.shape)
    if start + end != size:
        raise ValueError(f"it has {size:,} bytes, its header describes {start + end:,}")
    return metadata, tensors


def raw_bytes(array: Array) -> NDArray[np.uint8]:
    """The bytes of `array` in C order, without a copy where it has that order already."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _joined(pieces: Sequence[Array]) -> Sequence[Array]:
    """Small pieces as one: a chunk of thousands of samples must not be thousands of small writes."""
    return pieces if sum(piece.nbytes for piece in pieces) > len(pieces) * _SMALL else [np.concatenate(pieces)]


def _bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    total = dtype.itemsize
    for length in shape:
        total *= length
    return total
