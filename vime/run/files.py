"""Files that are either whole or not there: commit by rename, and wait for one that another node committed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from vime.errors import BufferFault, WaitTimeout

TEMPORARY = ".tmp"
"""Suffix of a file that is being written. What a crash left of them is deleted by `remove_temporaries`."""


def commit(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write `parts` one after the other to `path`, on disk and whole before the name appears; returns the bytes.

    Raises BufferFault naming the file and the bytes when the filesystem refuses (full, quota, read-only).
    """
    temporary = path.with_name(path.name + TEMPORARY)
    size = 0
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    written = os.write(descriptor, view)
                    size += written
                    view = view[written:]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BufferFault(f"cannot write {path}: {error.strerror} after {size:,} bytes{_free(path.parent)}") from error
    return size


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive the loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Delete what writers that were killed left half-written. Only for the one process that writes to `folder`."""
    for path in folder.glob("*" + TEMPORARY):
        path.unlink(missing_ok=True)


def wait_for_file(path: Path, size: int, timeout: float) -> None:
    """Wait until `path` shows on this node with its announced size, at most `timeout` seconds.

    A new file can show late on a network filesystem. Raises WaitTimeout naming the file and what was seen, or
    BufferFault when it is larger than announced.
    """
    deadline = time.monotonic() + timeout
    pause = 0.005
    while True:
        seen = _size(path)
        if seen == size:
            return
        if seen is not None and seen > size:
            raise BufferFault(f"{path} has {seen:,} bytes, more than the {size:,} that were announced")
        left = deadline - time.monotonic()
        if left <= 0:
            state = "is not there" if seen is None else f"has {seen:,} bytes"
            raise WaitTimeout(f"waited {timeout:g} s for {path} with {size:,} bytes: it {state}")
        # No event tells a node of a network filesystem that another made a file. Listing the folder makes it ask the
        # server again instead of repeating that the name does not exist.
        if path.parent.is_dir():
            sum(1 for _ in path.parent.iterdir())
        time.sleep(min(pause, left))
        pause = min(pause * 2, 0.25)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        # ESTALE, as well as a plain absence, passes when the node looks again.
        return None


def _free(folder: Path) -> str:
    try:
        state = os.statvfs(folder)
    except OSError:
        return ""
    return f" ({state.f_bavail * state.f_frsize:,} bytes are free there)"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` so that a reader, or a crash, sees the old content or the new, never a part of either."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
