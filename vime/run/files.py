"""Files that are either whole or not there: commit by rename, and wait for one that another node committed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from vime.errors import BufferFault, WaitTimeout

TEMPORARY = ".tmp"
"""Suffix of a file that is being written. What a crash left of them is deleted by `remove_temporaries`."""


def commit(path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Write `pieces` one after the other to `path`, on disk and whole before the name appears; returns the bytes.

    Raises BufferFault naming the file and the bytes when the filesystem refuses (full, quota, read-only).
    """
    size = 0
    try:
        for written in _replace(path, path.with_name(path.name + TEMPORARY), pieces, 0o600):
            size += written
        sync_folder(path.parent)
    except OSError as error:
        raise BufferFault(f"cannot write {path}: {error.strerror} after {size:,} bytes{_free(path.parent)}") from error
    return size


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` so that a reader, or a crash, sees the old content or the new, never a part of either.

    Several processes may replace it at once. Raises OSError.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    for _ in _replace(path, temporary, [data], 0o666):
        pass


def _replace(path: Path, temporary: Path, pieces: Iterable[bytes | memoryview], mode: int) -> Iterator[int]:
    """Write `pieces` to `temporary` and give it the name `path` once all is on disk; yields the bytes of each write."""
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    written = os.write(descriptor, view)
                    yield written
                    view = view[written:]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


RESERVED = 128 << 10
"""Bytes kept for a last small file on a disk that is full by then."""


def reserve(path: Path) -> None:
    """Make `path` a file whose RESERVED bytes are on the disk, for `write_reserved`. One that is there is kept."""
    if not path.exists():
        write_atomic(path, os.urandom(RESERVED))  # zeros might not be stored


def write_reserved(path: Path, reserved: Path, content: str) -> None:
    """Replace `path` within the space of `reserved`, which becomes it. Raises OSError when that cannot be done."""
    data = content.encode()
    if len(data) > RESERVED:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    descriptor = os.open(reserved, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(reserved, path)


def disk_problem(folder: Path) -> str | None:
    """Why no file can be written in `folder` at this moment, in one line; None when one can."""
    probe = folder / f".probe.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        write_atomic(probe, os.urandom(RESERVED))
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}{_free(folder)}"
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None
