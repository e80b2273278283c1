"""JSON Lines files that are still being written, or whose writer was killed: read line by line, never refused.

A line cut short by a kill is skipped. When a later attempt appended behind such a line without a newline between, its
first object is recovered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def parse_line(line: bytes) -> Record | None:
    """The JSON object of one line, or None when there is none. NaN and Infinity are accepted."""
    text = line.decode("utf-8", errors="replace").strip().strip("\0")
    if not text:
        return None
    start = text.find("{")
    while start >= 0:
        try:
            record = json.loads(text[start:])
        except (ValueError, RecursionError):
            # A killed writer's half line may stand in front of a whole object: try from where the next one could begin.
            start = text.find('{"', start + 1)
            continue
        return record if isinstance(record, dict) else None
    return None


def read_lines(path: Path) -> Iterator[Record]:
    """Each object of the file in order, one in memory at a time. A missing file has none."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for line in file:
            record = parse_line(line)
            if record is not None:
                yield record


class Tail:
    """A file that grows: each `poll` gives the objects appended since the last one and reads only those bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._rest = b""

    def poll(self) -> Iterator[Record]:
        """New whole lines. A line without its newline waits for the rest; a file that shrank is read from its start."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            if file.seek(0, 2) < self.offset:
                self.offset, self._rest = 0, b""
            file.seek(self.offset)
            for line in file:
                self.offset += len(line)
                line = self._rest + line
                self._rest = b"" if line.endswith(b"\n") else line
                if self._rest:
                    return
                record = parse_line(line)
                if record is not None:
                    yield record


def last_step(metrics: Path) -> int:
    """The `step` of the last whole line of a metrics file; 0 when there is none. Reads at most the last 64 KiB."""
    try:
        with metrics.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (1 << 16)))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
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
