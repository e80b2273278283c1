"""Numbers and times as a person reads them, and the characters to draw with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vime.report.outcome import seconds_of
from vime.report.sparkline import ASCII_BLOCKS, BLOCKS

# Escape sequences of terminals (CSI, OSC, single), then what is left of control characters.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


@dataclass(frozen=True)
class Glyphs:
    """Characters that not every terminal or log file can hold."""

    blocks: str = BLOCKS
    full: str = "█"
    arrow: str = "→"
    dot: str = "·"
    edge: str = "│"

    @classmethod
    def of(cls, encoding: str) -> Glyphs:
        """Those that `encoding` has."""
        if encoding.lower().startswith("utf"):
            return cls()
        return cls(blocks=ASCII_BLOCKS, full="#", arrow="->", dot="-", edge="|")


def clean(text: str) -> str:
    """`text` without terminal control sequences: a log's tail must not be able to move the reader's cursor."""
    return _CONTROL.sub("", text).expandtabs(4)


def number(value: float) -> str:
    """Four significant digits: 0.3125, 12.5, 3.1e-06, 48,210."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4g}" if size >= 1 else f"{value:.4f}"


def duration(seconds: float) -> str:
    """850 ms, 4.2 s, 51 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: int) -> str:
    """Bytes in binary units: 812 B, 3.9 MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def span(started: str | None, ended: str | None, arrow: str) -> str:
    """`2026-11-29 19:43:08 -> 19:52:10 UTC`; `since ...` while it goes.

    The day is repeated only when it changed. Empty without a start.
    """
    if seconds_of(started) is None or started is None:
        return ""
    start = started[:19].replace("T", " ")
    if seconds_of(ended) is None or ended is None:
        return f"since {start} UTC"
    end = ended[:19].replace("T", " ")
    return f"{start} {arrow} {end[11:] if end[:10] == start[:10] else end} UTC"


def plural(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
