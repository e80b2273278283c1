"""Loading a checkpoint without running what its files say.

torch and Megatron keep a checkpoint's index and its small objects as pickles, which can name any function to call. vime
writes tensors, numbers, texts and containers of them there, so while it loads, nothing else is made.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import default_planner, filesystem

from vime.errors import UserError

_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {
    "torch": {"Size", "device", "strided", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
"""By module, what torch's index of a checkpoint is made of besides RECORDS."""
RECORDS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem"))
"""Modules whose dataclasses and enumerations hold the rest: to make one assigns its fields and calls nothing."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        found = super().find_class(module, name) if module in RECORDS and "." not in name else None
        own = isinstance(found, type) and found.__module__ == module
        if own and (is_dataclass(found) or issubclass(found, enum.Enum)):  # type: ignore[arg-type]
            return found
        raise UserError(f"the checkpoint's index would call {module}.{name}, which vime does not write: not loaded")


def _load_index(file: BinaryIO) -> Any:
    return _PlainUnpickler(file).load()


def _load_bytes(planner: Any, read_item: Any, value: io.BytesIO) -> None:
    """torch's `DefaultLoadPlanner.load_bytes`, which asks for any object, with tensors and plain values alone."""
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"an object of the checkpoint is none that vime writes: not loaded: {reason}") from error
    name = read_item.dest_index.fqn
    if planner.flatten_state_dict:
        default_planner.set_element(planner.original_state_dict, planner.mappings[name], loaded)
    else:
        planner.state_dict[name] = loaded


@contextmanager
def plain_pickles() -> Iterator[None]:
    """While it is open, loading a distributed checkpoint makes tensors, numbers, texts and containers only.

    What else a file asks for raises UserError before it is called.
    """
    before = filesystem.pickle, default_planner.DefaultLoadPlanner.load_bytes
    filesystem.pickle = SimpleNamespace(load=_load_index, dump=pickle.dump)  # type: ignore[assignment]
    default_planner.DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        filesystem.pickle, default_planner.DefaultLoadPlanner.load_bytes = before  # type: ignore[method-assign]


def check_index(folder: Path) -> None:
    """Read the index of a checkpoint and forget it. Raises UserError when it would call anything."""
    with (folder / ".metadata").open("rb") as file:
        _load_index(file)


def check_owner(folder: Path) -> None:
    """Refuse a checkpoint that belongs to another user than this one or root. Raises UserError."""
    for path in (folder, *folder.iterdir()):
        owner = path.lstat().st_uid
        if owner not in (os.geteuid(), 0):
            raise UserError(
                f"cannot resume: {path} belongs to user {owner}, not to you ({os.geteuid()}): copy the run if you"
                " trust it"
            )
