"""Models that vime makes itself, kept between runs under VIME_CACHE.

A folder is complete when it holds the file `complete`. It is made beside its place and renamed into it, under a lock
that ends with its holder, so that two runs never make the same model twice and no run sees half a model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vime.errors import WaitTimeout

VERSION = 1
"""Raise it when the same configuration makes another model than before."""
MARKER = "complete"
LOCK_TIMEOUT = 3600.0
"""Seconds to wait for another run that makes the same model."""


def cache_folder() -> Path:
    """Folder of all models: VIME_CACHE, or `~/.cache/vime`, and then `models`."""
    return Path(os.environ.get("VIME_CACHE") or Path.home() / ".cache" / "vime").expanduser().absolute() / "models"


def model_key(parts: dict[str, Any]) -> str:
    """Name of the model that a configuration makes: a hash of its JSON values and of VERSION."""
    text = json.dumps({"version": VERSION, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def cached_model(
    key: str, make: Callable[[Path], None], wait: Callable[[float], None] = time.sleep, timeout: float = LOCK_TIMEOUT
) -> Path:
    """The complete folder of model `key`, made by `make(empty folder)` when there is none.

    `wait(seconds)` is called while another process makes it. Raises WaitTimeout when that takes over `timeout` seconds;
    what `make` raises passes through and leaves nothing behind.
    """
    folder = cache_folder() / key
    if (folder / MARKER).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{key}.lock"), wait, timeout):
        if (folder / MARKER).exists():
            return folder
        _sweep(folder)
        half_made = folder.with_name(f"{key}.making-{secrets.token_hex(4)}")
        half_made.mkdir()
        try:
            make(half_made)
            (half_made / MARKER).touch()
            half_made.rename(folder)
        finally:
            shutil.rmtree(half_made, ignore_errors=True)
    return folder


def _sweep(folder: Path) -> None:
    # Under the lock nobody else is making this model: what lies here was left by a process that was killed.
    for left in [folder, *folder.parent.glob(f"{folder.name}.making-*")]:
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, wait: Callable[[float], None], timeout: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout
    said = False
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                # The kernel gives the lock up when its holder ends, however it ends.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WaitTimeout(f"waited {timeout:g} s for another run to make the model of {path}") from None
                if not said:
                    print(f"waiting for another run to make the model of {path}", flush=True)
                    said = True
                wait(0.2)
        yield
    finally:
        os.close(descriptor)
