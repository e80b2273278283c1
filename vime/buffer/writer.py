"""The generator's side of the buffer: groups become chunks, chunks become a batch, a batch is announced.

One writer at a time writes to a buffer. It may be used from a worker thread (every call does file and store work), as
long as calls do not overlap.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.buffer.chunk import Chunk, ChunkInfo, encode_chunk
from vime.buffer.control import BatchMessage, Control
from vime.buffer.manifest import (
    BATCHES,
    CHUNKS,
    Entry,
    Manifest,
    batch_files,
    collect,
    committed,
    entries,
    read_manifest,
)
from vime.buffer.sample import Group
from vime.config import Buffer
from vime.errors import BufferFault, UserError
from vime.run.directory import RunDir
from vime.run.files import commit, remove_temporaries

CHUNK_NAME = re.compile(r"chunk_(\d+)-[0-9a-f]+\.safetensors")
"""A number in the order of commits, and random digits: a name is never used for two contents, whatever was deleted."""


@dataclass(frozen=True)
class Resumed:
    """What an earlier attempt left behind, as `BufferWriter.resume` found it."""

    step: int
    """The next step to generate a batch for."""
    cursor: dict[str, Any] | None
    """Where the prompt stream stood after the last committed batch; None: take the checkpoint's."""
    groups: frozenset[int]
    """Stream positions of groups that are already written for that batch: not to be generated again."""
    announced: tuple[int, ...]
    """Steps of the batches that were committed and not trained; they have been announced again."""
    discarded: tuple[int, ...]
    """Steps of batches that were deleted because those between them and the checkpoint are gone."""
    damaged: tuple[str, ...] = ()
    """Why batches and groups were deleted that are to be generated again: what is wrong with which file."""


class BufferWriter:
    """Writes the batches of one run. `experts` is the model's expert count, needed when samples carry routes."""

    def __init__(self, run_dir: RunDir, control: Control, config: Buffer, experts: int | None = None) -> None:
        self._folder = run_dir.buffer
        self._control = control
        self._config = config
        self._experts = experts
        for name in (CHUNKS, BATCHES):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        self._groups: list[Group] = []
        self._chunks: list[ChunkInfo] = []
        self._entries: list[Entry] = []
        self._newest = -1
        self._waiting: dict[int, int] = {}
        self._step = 0
        self._next_chunk = 1 + max((_number(name) for name in self._chunk_files()), default=-1)

    def resume(self, done: int) -> Resumed:
        """Take up what is on disk when `done` optimizer steps are in the checkpoint that the trainers start from.

        Call it once, before the first `add`, in a fresh run too (with 0). Deletes half-written files and batches that
        the checkpoint covers; announces the later ones again, in order; counts groups in chunks of no batch into the
        next. From the first damaged file on, everything is deleted and generated again.
        """
        for name in (CHUNKS, BATCHES):
            remove_temporaries(self._folder / name)
        damaged = self._drop_damaged(done)
        collect(self._folder, done)
        manifests = committed(self._folder)
        discarded: tuple[int, ...] = ()
        if [m.step for m in manifests] != list(range(done + 1, done + 1 + len(manifests))):
            # An older checkpoint than the newest was chosen: the batches in between are deleted, and what was generated
            # after them came from a policy that this run will not reach. Chunks of no batch go first, then the rest in
            # an order in which a crash leaves none that looks usable.
            discarded = tuple(m.step for m in manifests)
            for path in self._loose(manifests):
                (self._folder / CHUNKS / path).unlink()
            collect(self._folder, discarded[-1])
            manifests = []
        for manifest in manifests:
            self._waiting[manifest.step] = manifest.bytes
            self._announce(manifest)
        self._step = manifests[-1].step if manifests else done
        loose = self._loose(manifests)
        for place, name in enumerate(loose):
            try:
                self._adopt(name)
            except BufferFault as error:
                damaged += (str(error),)
                for later in reversed(loose[place:]):  # so that a crash in between leaves the first ones
                    (self._folder / CHUNKS / later).unlink()
                break
        return Resumed(
            step=self._step + 1,
            cursor=manifests[-1].cursor if manifests else None,
            groups=frozenset(entry.group for entry in self._entries),
            announced=tuple(m.step for m in manifests),
            discarded=discarded,
            damaged=damaged,
        )

    def add(self, group: Group) -> None:
        """Put a finished group into the batch. Commits a chunk, and so may wait for room, every `groups_per_chunk`."""
        self._groups.append(group)
        if len(self._groups) >= self._config.groups_per_chunk:
            self._commit_chunk()

    @property
    def next_commits(self) -> bool:
        """Whether the next `add` writes a chunk; the others only remember the group."""
        return len(self._groups) + 1 >= self._config.groups_per_chunk

    def commit_batch(self, step: int, metrics: Mapping[str, float], cursor: Mapping[str, Any]) -> Manifest:
        """Commit everything added since the last batch as the batch of `step`, and announce it.

        Steps follow each other without a gap. Raises ValueError for another step or an empty batch, BufferFault when
        the disk refuses, WaitTimeout when no room was made in time.
        """
        if step != self._step + 1:
            raise ValueError(f"the batch after step {self._step} is {self._step + 1}, not {step}")
        if self._groups:
            self._commit_chunk()
        if not self._entries:
            raise ValueError(f"the batch of step {step} has no samples")
        manifest = Manifest(
            step=step,
            version=self._newest,
            chunks=tuple(self._chunks),
            samples=tuple(self._entries),
            metrics=dict(metrics),
            cursor=dict(cursor),
        )
        commit(self._folder / BATCHES / manifest.file_name, [manifest.to_bytes()])
        self._step = step
        self._waiting[step] = manifest.bytes
        self._chunks, self._entries, self._newest = [], [], -1
        self._announce(manifest)
        return manifest

    def wait_for_room(self, needed: int = 1) -> None:
        """Wait until `needed` more bytes fit into `buffer.max_bytes`, at most `buffer.wait_timeout` seconds.

        Raises WaitTimeout naming the batch whose training would make room, or UserError when one batch alone is larger
        than the budget, because no wait would end that.
        """
        deadline = time.monotonic() + self._config.wait_timeout
        limit = self._config.max_bytes
        while True:
            trained = self._control.consumed()
            self._waiting = {s: size for s, size in self._waiting.items() if trained is None or s > trained}
            own = sum(chunk.bytes for chunk in self._chunks) + needed
            held = sum(self._waiting.values())
            if own + held <= limit:
                return
            if not self._waiting:
                raise UserError(
                    f"buffer.max_bytes={limit} is less than the batch of step {self._step + 1} alone, which has"
                    f" reached {own} bytes: raise it"
                )
            oldest = min(self._waiting)
            self._control.wait_consumed(
                oldest,
                max(deadline - time.monotonic(), 0.0),
                f"the trainers to train the batch of step {oldest}: {held:,} bytes wait to be trained, {own:,} more"
                f" do not fit into buffer.max_bytes={limit:,}",
            )

    def _commit_chunk(self) -> None:
        pieces = encode_chunk(self._groups, self._experts)
        self.wait_for_room(sum(len(piece) for piece in pieces))
        name = f"chunk_{self._next_chunk:06d}-{secrets.token_hex(4)}.safetensors"
        size = commit(self._folder / CHUNKS / name, pieces)
        self._next_chunk += 1
        self._count_in(ChunkInfo(name=name, bytes=size), self._groups)
        self._groups = []

    def _count_in(self, info: ChunkInfo, groups: list[Group]) -> None:
        self._chunks.append(info)
        self._entries.extend(entries(info.name, groups))
        self._newest = max(self._newest, *(sample.newest_version for group in groups for sample in group.samples))

    def _adopt(self, name: str) -> None:
        path = self._folder / CHUNKS / name
        chunk = Chunk.open(path)
        groups = [  # reads all, before any of it counts
            Group(g.uid, g.index, tuple(chunk.sample(i) for i in range(g.first, g.first + g.count)))
            for g in chunk.groups
        ]
        self._count_in(ChunkInfo(name=name, bytes=path.stat().st_size), groups)

    def _announce(self, manifest: Manifest) -> None:
        size = (self._folder / BATCHES / manifest.file_name).stat().st_size
        self._control.post(BatchMessage(step=manifest.step, manifest=manifest.file_name, bytes=size))

    def _drop_damaged(self, done: int) -> tuple[str, ...]:
        """Delete the batches from the first damaged one after `done` on, and every chunk that no batch left names.

        Returns what was wrong. Whether the samples of an unreadable manifest are trained nobody can tell any more, so
        chunks of no batch are not counted into the next one then: nothing may be trained twice.
        """
        problems: list[str] = []
        whole: list[Manifest] = []
        dropped: list[Path] = []
        broken = False
        for step, path in batch_files(self._folder):
            try:
                manifest = read_manifest(path)
                if step > done and not broken:
                    self._verify(manifest)
            except BufferFault as error:
                problems.append(str(error))
                dropped.append(path)
                broken = broken or step > done
                continue
            if step > done and broken:
                dropped.append(path)
            else:
                whole.append(manifest)
        if dropped:
            # A crash in between leaves a manifest whose chunks are gone: it is dropped the next time.
            for name in self._loose(whole):
                (self._folder / CHUNKS / name).unlink()
            for path in dropped:
                path.unlink()
        return tuple(problems)

    def _verify(self, manifest: Manifest) -> None:
        """Read all that the batch consists of. Raises BufferFault naming a file that is not what was committed."""
        for info in manifest.chunks:
            path = self._folder / CHUNKS / info.name
            seen = path.stat().st_size if path.exists() else None
            if seen != info.bytes:
                state = "is missing" if seen is None else f"has {seen:,} bytes"
                raise BufferFault(f"{path} of the batch of step {manifest.step} {state}, {info.bytes:,} were committed")
            chunk = Chunk.open(path)
            for index in range(len(chunk)):
                chunk.sample(index)

    def _chunk_files(self) -> list[str]:
        names = (path.name for path in (self._folder / CHUNKS).iterdir())
        return sorted((name for name in names if CHUNK_NAME.fullmatch(name)), key=_number)

    def _loose(self, manifests: list[Manifest]) -> list[str]:
        """Chunks that no batch names: committed after the last batch, in the order of their commits."""
        named = {chunk.name for manifest in manifests for chunk in manifest.chunks}
        return [name for name in self._chunk_files() if name not in named]


def _number(name: str) -> int:
    match = CHUNK_NAME.fullmatch(name)
    assert match is not None
    return int(match[1])
