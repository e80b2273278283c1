"""A Hugging Face folder's tensors: read slice by slice, written shard by shard. No whole model is ever in memory."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vime.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HfReader:
    """Reads slices of tensors from the safetensors files of a folder, which it maps and does not load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / INDEX, folder / SINGLE
        if index.exists():
            self._files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif single.exists():
            with safe_open(single, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}")
        self._open: dict[str, safe_open] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises UserError when it is missing."""
        return tuple(self._view(name).get_shape())

    def slice(self, name: str, axis: int | None, rank: int, size: int) -> Tensor:
        """The rank-th of `size` equal slices of a tensor along `axis`, or all of it when axis is None.

        Raises UserError when the folder lacks the tensor or the axis does not divide.
        """
        view = self._view(name)
        if axis is None or size == 1:
            return view[:]  # type: ignore[no-any-return]
        length = view.get_shape()[axis]
        if length % size:
            raise UserError(f"{name}: {length} along axis {axis} does not divide by tensor_parallel={size}")
        share = length // size
        window = [slice(None)] * axis + [slice(rank * share, (rank + 1) * share)]
        return view[tuple(window)]  # type: ignore[no-any-return]

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows start to end of a tensor; none when start is past the end. Raises UserError when it is missing."""
        view = self._view(name)
        return view[min(start, end) : end]  # type: ignore[no-any-return]

    def _view(self, name: str) -> Any:
        if name not in self._files:
            raise UserError(f"{self.folder} has no tensor {name!r}")
        file_name = self._files[name]
        if file_name not in self._open:
            self._open[file_name] = safe_open(self.folder / file_name, framework="pt")
        return self._open[file_name].get_slice(name)


class HfWriter:
    """Writes tensors into a folder as safetensors shards of at most `shard_bytes`; `join_shards` makes them a model.

    Several processes may write to one folder, each with a `writer` number of its own.
    """

    def __init__(self, folder: Path, writer: int = 0, shard_bytes: int = 4 << 30) -> None:
        self.folder = folder
        self._writer = writer
        self._limit = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add tensors, flushing a shard whenever it is full."""
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if self._pending and self._pending_bytes + size > self._limit:
                self._flush()
            self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
            self._pending_bytes += size

    def close(self) -> None:
        """Flush the last shard and leave word of what was written."""
        self._flush()
        written = {"shards": self._shards, "bytes": self._total_bytes}
        (self.folder / _LISTING.format(self._writer)).write_text(json.dumps(written), encoding="utf-8")

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self.folder / _SHARD.format(self._writer, len(self._shards))
        save_file(self._pending, path, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0


_LISTING, _SHARD = ".writer-{:05d}.json", ".shard-{:05d}-{:05d}.tmp"


def join_shards(folder: Path, writers: Sequence[int], wait: float = 60.0) -> None:
    """Make one model of what the writers wrote and closed: number the shards and write the index, last.

    wait: seconds that another node's listing may take to show. Raises TimeoutError naming one that does not.
    """
    shards: list[tuple[str, list[str]]] = []
    total = 0
    for writer in writers:
        listing = folder / _LISTING.format(writer)
        written = json.loads(_await_text(listing, wait))
        shards += [(_SHARD.format(writer, i), names) for i, names in enumerate(written["shards"])]
        total += written["bytes"]
        listing.unlink()
    if len(shards) == 1:
        (folder / shards[0][0]).rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, (temporary, names) in enumerate(shards):
        file_name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / temporary).rename(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _await_text(path: Path, seconds: float) -> str:
    """A small file's text once it shows, complete; JSON that another node wrote and closed."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            text = path.read_text(encoding="utf-8")
            json.loads(text)
            return text
        except (FileNotFoundError, ValueError):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} did not show within {seconds:g} s") from None
            time.sleep(0.1)


def copy_sidecars(source: Path, target: Path) -> None:
    """Copy everything of a model folder but its weights: configuration, tokenizer, chat template."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix not in {".safetensors", ".bin", ".pt"} and path.name != INDEX:
            shutil.copyfile(path, target / path.name)


def torch_dtype(name: str) -> torch.dtype:
    """`float32` -> torch.float32."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
