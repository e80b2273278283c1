"""A batch manifest: which samples of which chunks one training step trains on, and what generation measured.

Trainer rank 0 reads it and broadcasts its bytes; every rank then maps the chunks and takes its share.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError, model_validator

from vime.buffer.chunk import ChunkInfo
from vime.buffer.sample import Group
from vime.config.section import Frozen
from vime.errors import BufferFault

CHUNKS = "chunks"
BATCHES = "batches"
"""Folders of the buffer."""


class Entry(Frozen):
    """One sample of the batch: where it lies, and what is needed to balance and weigh it without reading it."""

    chunk: str
    """Name of the chunk file."""
    index: int = Field(ge=0)
    """Position in the chunk."""
    group: int
    """Position of the prompt in the prompt stream: samples of one group share it."""
    tokens: int = Field(ge=0)
    """Prompt and response tokens."""
    response_tokens: int = Field(ge=0)
    masked_in: int = Field(ge=0)
    """Response tokens that are trained on."""
    reward: float
    """As stored in the chunk, so rounded to float32."""

    @model_validator(mode="before")
    @classmethod
    def _without_weight(cls, value: Any) -> Any:
        """A run that began with an older vime has batches whose samples say a weight, which was always 1."""
        if isinstance(value, dict) and value.get("weight") == 1:
            return {name: item for name, item in value.items() if name != "weight"}
        return value


class Manifest(Frozen):
    """One training step's batch."""

    step: int = Field(ge=1)
    version: int = Field(ge=-1)
    """Newest policy version that generated a token of it; -1 when every response is empty."""
    chunks: tuple[ChunkInfo, ...]
    samples: tuple[Entry, ...]
    metrics: dict[str, float] = {}
    """What the generator measured, by metric name."""
    cursor: dict[str, Any] = {}
    """Where the prompt stream stands after this batch: what a checkpoint keeps and a resumed generator starts from."""

    @model_validator(mode="after")
    def _chunks_are_named(self) -> Manifest:
        names = {chunk.name for chunk in self.chunks}
        strange = sorted({sample.chunk for sample in self.samples} - names)
        if strange:
            raise ValueError(f"samples lie in {strange[0]}, which is not among the batch's chunks")
        return self

    @classmethod
    def from_bytes(cls, data: bytes, origin: str = "the batch manifest") -> Manifest:
        """Parse and validate. Raises BufferFault naming `origin`."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(str(part) for part in problem["loc"])
            raise BufferFault(f"{origin} does not read as a manifest: {place or 'it'}: {problem['msg']}") from error

    def to_bytes(self) -> bytes:
        """JSON in UTF-8."""
        return self.model_dump_json().encode()

    @property
    def file_name(self) -> str:
        """Name in the folder of batches."""
        return f"step_{self.step}.json"

    @property
    def bytes(self) -> int:
        """Size of its chunks."""
        return sum(chunk.bytes for chunk in self.chunks)


def entries(chunk: str, groups: tuple[Group, ...] | list[Group]) -> list[Entry]:
    """The manifest's entries for `groups`, written in this order as `chunk`."""
    samples = [(group.index, sample) for group in groups for sample in group.samples]
    return [
        Entry(
            chunk=chunk,
            index=position,
            group=group,
            tokens=len(sample.token_ids),
            response_tokens=sample.response_length,
            masked_in=int(sample.loss_mask.sum()),
            reward=float(np.float32(sample.reward)),
        )
        for position, (group, sample) in enumerate(samples)
    ]


def read_manifest(path: Path) -> Manifest:
    """Read a committed manifest. Raises BufferFault naming the file when it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BufferFault(f"cannot read {path}: {error.strerror}") from error
    manifest = Manifest.from_bytes(data, str(path))
    if path.name != manifest.file_name:
        raise BufferFault(f"{path} is the manifest of step {manifest.step}")
    return manifest


def batch_files(buffer: Path) -> list[tuple[int, Path]]:
    """Step and path of every committed manifest, by step."""
    folder = buffer / BATCHES
    paths = folder.iterdir() if folder.is_dir() else ()
    found = ((re.fullmatch(r"step_(\d+)\.json", path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in found if match)


def committed(buffer: Path) -> list[Manifest]:
    """Every committed manifest of a run's buffer folder, by step."""
    return [read_manifest(path) for _, path in batch_files(buffer)]


def collect(buffer: Path, up_to_step: int) -> list[int]:
    """Delete the batches up to `up_to_step` and the chunks that no later batch needs; returns their steps.

    Call it once a checkpoint covers those steps. Chunks go before their manifest: a crash in between leaves a manifest
    that the next call finishes, and never a chunk that looks as if no batch had used it yet.
    """
    manifests = committed(buffer)
    kept = {chunk.name for manifest in manifests if manifest.step > up_to_step for chunk in manifest.chunks}
    done = [manifest for manifest in manifests if manifest.step <= up_to_step]
    for manifest in done:
        for chunk in manifest.chunks:
            if chunk.name not in kept:
                (buffer / CHUNKS / chunk.name).unlink(missing_ok=True)
        (buffer / BATCHES / manifest.file_name).unlink(missing_ok=True)
    return [manifest.step for manifest in done]
