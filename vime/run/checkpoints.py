"""The folder of a run's checkpoints: which are complete, how one appears whole, which old ones go. No torch, no model.

A checkpoint is written as `.step_<n>.tmp`; its marker is its last file, and then it gets its name. Nothing else counts.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from vime.config import Config
from vime.config.file_kind import read_regular
from vime.config.section import Frozen
from vime.errors import UserError
from vime.run.directory import RunDir
from vime.run.files import sync_folder, write_atomic

MARKER = "complete"
"""The file that is written last, JSON. It lists the others with their sizes: a torn copy does not pass either."""
MAX_MARKER = 64 << 20
"""Bytes of a marker, which names every file of its checkpoint."""
FIXED = (
    "model.path",
    "model.tiny",
    "data.source",
    "data.task",
    "data.task_args",
    "data.size",
    "data.held_out",
    "data.path",
    "data.shuffle",
    "algorithm.name",
    "algorithm.reference_refresh",
    "training.dtype",
    "training.distributed_optimizer",
    "run.seed",
)
"""Settings that a resumed run must share with its checkpoint: with others the weights do not fit, or the prompt cursor
points into a different stream. Parallel sizes, learning rates, numbers of steps and the like may change."""


class Facts(Frozen):
    """What a checkpoint says of itself besides its tensors: the content of its marker."""

    step: int = Field(ge=0)
    """Optimizer steps done; also the policy version."""
    cursor: dict[str, Any]
    """Where the prompt stream stood after the last batch that was trained; {} at the beginning."""
    attempt: int
    time: str
    """When it was saved, UTC."""
    tensor_parallel: int
    pipeline_parallel: int
    settings: dict[str, Any]
    """The settings of FIXED."""
    files: dict[str, int] = {}
    """Name and bytes of every other file."""


@dataclass(frozen=True)
class Complete:
    """A checkpoint that can be loaded."""

    path: Path
    facts: Facts

    @property
    def bytes(self) -> int:
        """Size of its files, without the marker."""
        return sum(self.facts.files.values())


@dataclass(frozen=True)
class Incomplete:
    """A folder that a save left unfinished, or that was damaged later. Never loaded."""

    path: Path
    reason: str


def survey(folder: Path) -> tuple[list[Complete], list[Incomplete]]:
    """Every checkpoint in `folder`: the complete ones by step, oldest first, and what is incomplete."""
    complete, incomplete = [], []
    for step, path, finished in _folders(folder):
        if not finished:
            incomplete.append(Incomplete(path, "its saving was interrupted"))
            continue
        found = _read(path, step)
        if isinstance(found, Complete):
            complete.append(found)
        else:
            incomplete.append(found)
    return sorted(complete, key=lambda checkpoint: checkpoint.facts.step), incomplete


def begin(folder: Path, step: int) -> Path:
    """A fresh folder to write the checkpoint of `step` into. Deletes what interrupted saves left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".step_*"):
        shutil.rmtree(path)
    writing = folder / f".step_{step}.tmp"
    writing.mkdir(mode=0o700)
    return writing


def commit(writing: Path, facts: Facts) -> Complete:
    """Make what `begin` gave and the ranks have filled the checkpoint of `facts.step`; all of it is on disk then."""
    files = {}
    for path in sorted(writing.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            files[path.name] = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    facts = facts.model_copy(update={"files": files})
    write_atomic(writing / MARKER, facts.model_dump_json(indent=2) + "\n")
    sync_folder(writing)
    target = writing.with_name(f"step_{facts.step}")
    if target.exists():  # incomplete, or of an attempt whose later steps were lost: this one replaces it
        _delete(target)
    writing.rename(target)
    sync_folder(target.parent)
    return Complete(target, facts)


def prune(folder: Path, keep: int) -> list[int]:
    """Delete all complete checkpoints but the newest `keep`; returns the steps deleted. Only after a `commit`."""
    old = survey(folder)[0][:-keep]
    for checkpoint in old:
        _delete(checkpoint.path)
    return [checkpoint.facts.step for checkpoint in old]


def fixed_settings(config: Config) -> dict[str, Any]:
    """The settings of FIXED, as JSON."""
    values = config.model_dump(mode="json")
    return {key: values[key.partition(".")[0]][key.partition(".")[2]] for key in FIXED}


def newest(folder: Path, config: Config) -> tuple[Complete, list[Incomplete]]:
    """The newest complete checkpoint, which must be one of this configuration, and the incomplete ones.

    Raises UserError when there is none to resume from, or a setting of FIXED differs.
    """
    complete, incomplete = survey(folder)
    if not complete:
        saves = "" if config.training.save_interval else "; training.save_interval is 0, which saves none"
        others = "".join(f"; {one.path.name} is incomplete: {one.reason}" for one in incomplete)
        raise UserError(f"cannot resume: {folder} has no complete checkpoint{saves}{others}")
    checkpoint = complete[-1]
    for key, value in fixed_settings(config).items():
        if key.startswith("data.") and config.data.allow_change:
            continue
        saved = checkpoint.facts.settings.get(key)
        if saved != value:
            raise UserError(f"cannot resume: {checkpoint.path} was saved with {key}={saved}, which is {value} now")
    return checkpoint, incomplete


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # there is none
        return []


def _folders(folder: Path) -> Iterator[tuple[int, Path, bool]]:
    for path in _entries(folder):
        if match := re.fullmatch(r"step_(\d+)|\.step_(\d+)\.tmp", path.name):
            yield int(match[1] or match[2]), path, match[1] is not None


def _read(path: Path, step: int) -> Complete | Incomplete:
    try:
        facts = Facts.model_validate_json(read_regular(path / MARKER, MAX_MARKER))
    except FileNotFoundError:
        return Incomplete(path, f"it has no {MARKER}")
    except (OSError, ValidationError) as error:
        return Incomplete(path, f"its {MARKER} does not read: {str(error).partition(chr(10))[0]}")
    if facts.step != step:
        return Incomplete(path, f"its {MARKER} is that of step {facts.step}")
    for name, size in facts.files.items():
        seen = _size(path / name)
        if seen != size:
            return Incomplete(path, f"{name} {'is missing' if seen is None else f'has {seen} of {size} bytes'}")
    return Complete(path, facts)


def _size(path: Path) -> int | None:
    try:
        state = path.stat()
    except (OSError, ValueError):
        return None
    return state.st_size if stat.S_ISREG(state.st_mode) else None


def _delete(path: Path) -> None:
    # Under another name first: a kill halfway must not leave a checkpoint that looks damaged.
    doomed = path.with_name(f".{path.name}.deleted")
    path.rename(doomed)
    shutil.rmtree(doomed)


def newest_checkpoint(run: RunDir) -> int:
    """Step of the newest complete checkpoint; 0 when there is none."""
    return max((checkpoint.facts.step for checkpoint in survey(run.checkpoints)[0]), default=0)
