"""What a file that does not read as it should seems to be, told from its first bytes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

HEAD = 512
"""Bytes that `file_kind` looks at."""
_LFS = b"version https://git-lfs.github.com/spec/"
_BEGINNINGS = (
    (_LFS, "a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"),
    (b"\x1f\x8b", "compressed with gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (b"BZh", "compressed with bzip2"),
    (b"\xfd7zXZ\x00", "compressed with xz"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"%PDF-", "a PDF file"),
    (b"\xff\xfe", "text in UTF-16, not UTF-8"),
    (b"\xfe\xff", "text in UTF-16, not UTF-8"),
)


def file_kind(head: bytes) -> str | None:
    """What a file whose first bytes are `head` is, in words that follow `is`; None when they are nothing known."""
    if not head:
        return "empty"
    for beginning, kind in _BEGINNINGS:
        if head.startswith(beginning):
            return kind
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "a web page, such as a download's error page"
    if len(head) >= 4 and not head[1::2].strip(b"\0") and head[::2].strip(b"\0"):
        return "text in UTF-16, not UTF-8"
    if len(head) >= 4 and not head[::2].strip(b"\0") and head[1::2].strip(b"\0"):
        return "text in UTF-16, not UTF-8"
    if not head.strip(b"\0"):
        return "nothing but zero bytes, as a copy that was cut short leaves"
    return None


def is_file(path: Path) -> bool:
    """As `Path.is_file`, which raises for a name that is too long for one."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """As `Path.is_dir`, which raises for a name that is too long for one."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes, without waiting on a pipe or reading a device for ever.

    Raises OSError, whose strerror says what else it is or how large.
    """
    if "\0" in str(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(0, f"it is {other_kind(state.st_mode)}, not a file", str(path))
    with open(descriptor, "rb") as file:
        content = file.read(min(most, state.st_size) + 1)
    if len(content) > most:
        raise OSError(0, f"it has {max(state.st_size, most + 1):,} bytes; at most {most:,} are read", str(path))
    return content


def other_kind(mode: int) -> str:
    """What a file of this mode is that is not a regular one."""
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((word for test, word in kinds if test(mode)), "something else")
