"""A Hugging Face folder's tensors: read part by part, written shard by shard. No whole model is ever in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
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
    """Reads parts of tensors from the safetensors files of a folder, which it maps and does not load."""

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

    def part(self, name: str, axis: int | None, rank: int, size: int) -> Tensor:
        """The rank-th of `size` equal parts of a tensor along `axis`, or all of it when axis is None.

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
    """Writes tensors into a folder as safetensors shards of at most `shard_bytes`, the index last."""

    def __init__(self, folder: Path, shard_bytes: int = 4 << 30) -> None:
        self.folder = folder
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
        """Flush the last shard, name the shards i-of-n and write the index."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            (self.folder / self._temporary(0)).rename(self.folder / SINGLE)
            return
        weight_map = {}
        for i, names in enumerate(self._shards):
            file_name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / self._temporary(i)).rename(self.folder / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _flush(self) -> None:
        if not self._pending:
            return
        save_file(self._pending, self.folder / self._temporary(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    @staticmethod
    def _temporary(shard: int) -> str:
        return f".shard-{shard:05d}.tmp"


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
