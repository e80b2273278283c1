"""JSON Lines files that are still being written, or whose writer was killed: read line by line, never refused.

A line cut short by a kill is skipped. When a later attempt appended behind such a line without a newline between, its
first object is recovered.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]
MAX_LINE = 1 << 20
"""Bytes of a line; a longer one is left out."""
MAX_BYTES = 1 << 30
"""Bytes of a file that are read."""
_RESTARTS = 32
"""Places in a line from which an object may begin behind a torn one."""


def parse_line(line: bytes) -> Record | None:
    """The JSON object of one line, or None when there is none. NaN and Infinity are accepted."""
    text = line.decode("utf-8", errors="replace").strip().strip("\0")
    if not text:
        return None
    start = text.find("{")
    for _ in range(_RESTARTS):
        if start < 0:
            break
        try:
            record = json.loads(text[start:])
        except (ValueError, RecursionError):
            # A killed writer's half line may stand in front of a whole object: try from where the next one could begin.
            start = text.find('{"', start + 1)
            continue
        return record if isinstance(record, dict) else None
    return None


def read_lines(path: Path) -> Iterator[Record]:
    """Each object of the file in order, one in memory at a time. What is missing, or no regular file, has none."""
    file = _open(path)
    if file is None:
        return
    with file:
        for line in _lines(file):
            record = parse_line(line)
            if record is not None:
                yield record


def overlong_lines(path: Path) -> int:
    """How many lines `read_lines` leaves out because they are longer than MAX_LINE."""
    file = _open(path)
    if file is None:
        return 0
    with file:
        return sum(line is None for line in _parts(file))


def _open(path: Path) -> BinaryIO | None:
    """The file, unless it is none: opening a pipe would wait, and reading a device might never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return open(descriptor, "rb")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    return (line for line in _parts(file) if line is not None)


def _parts(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of the first MAX_BYTES; None for one that is longer than MAX_LINE."""
    while file.tell() < MAX_BYTES and (line := file.readline(MAX_LINE)):
        if len(line) < MAX_LINE or line.endswith(b"\n"):
            yield line
            continue
        while file.tell() < MAX_BYTES and (line := file.readline(MAX_LINE)) and not line.endswith(b"\n"):
            pass
        yield None


class Tail:
    """A file that grows: each `poll` gives the objects appended since the last one and reads only those bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._rest = b""
        self._skipping = False

    def poll(self) -> Iterator[Record]:
        """New whole lines. A line without its newline waits for the rest; a file that shrank is read from its start."""
        file = _open(self.path)
        if file is None:
            return
        with file:
            if file.seek(0, 2) < self.offset:
                self.offset, self._rest, self._skipping = 0, b"", False
            file.seek(self.offset)
            while part := file.readline(MAX_LINE):
                self.offset += len(part)
                if not part.endswith(b"\n"):
                    self._rest += part
                    if len(self._rest) > MAX_LINE:
                        self._rest, self._skipping = b"", True
                    continue
                line, skipped = self._rest + part, self._skipping
                self._rest, self._skipping = b"", False
                record = None if skipped else parse_line(line)
                if record is not None:
                    yield record


def last_step(metrics: Path) -> int:
    """The `step` of the last whole line of a metrics file; 0 when there is none. Reads at most the last 64 KiB."""
    file = _open(metrics)
    if file is None:
        return 0
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16)))
        lines = file.read(1 << 16).split(b"\n")[:-1]
    for line in reversed(lines):
        record = parse_line(line)
        if record is not None and isinstance(record.get("step"), int):
            return int(record["step"])
    return 0


def _append_line(path: Path, value: Mapping[str, Any]) -> None:
    # One write to a file opened with O_APPEND: lines of several processes on one host do not mix.
    line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"{path}: wrote {written} of {len(line)} bytes of a line")
    finally:
        os.close(descriptor)
