"""What of a run's files a report could not read, so that nothing is left out in silence."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from vime.config.file_kind import other_kind
from vime.run.directory import RunDir
from vime.run.jsonl import MAX_BYTES, MAX_LINE, overlong_lines


def unreadable(run: RunDir) -> Iterator[str]:
    """One line for each file that is no regular one, or that was read in part."""
    for path in (run.status, run.config, run.metrics, run.events):
        yield from _of(path, lines=path.suffix == ".jsonl")


def _of(path: Path, *, lines: bool) -> Iterator[str]:
    try:
        state = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        yield f"{path.name} cannot be read: {error.strerror}"
        return
    if not stat.S_ISREG(state.st_mode):
        yield f"{path.name} is {other_kind(state.st_mode)}, not a file: it was not read"
        return
    try:
        path.open("rb").close()
    except OSError as error:
        yield f"{path.name} cannot be read: {error.strerror}"
        return
    if lines and state.st_size > MAX_LINE:
        if state.st_size > MAX_BYTES:
            yield f"{path.name} has {state.st_size:,} bytes: only the first {MAX_BYTES:,} were read"
        left_out = overlong_lines(path)
        if left_out:
            yield f"{path.name}: {left_out} line{'s' if left_out > 1 else ''} of over {MAX_LINE:,} bytes were left out"
