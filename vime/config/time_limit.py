"""SLURM's time limits: what people write, in seconds and back."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

FORMS = "M, M:S, H:M:S, D-H, D-H:M or D-H:M:S"
# A field after the first is written in two digits, as everywhere in SLURM; the first may exceed its unit (90 minutes).
_DAYS = re.compile(r"(?P<d>\d+)-(?P<h>\d{1,2})(?::(?P<m>\d{1,2})(?::(?P<s>\d{1,2}))?)?")
_HOURS = re.compile(r"(?P<h>\d+):(?P<m>\d{1,2}):(?P<s>\d{1,2})")
_MINUTES = re.compile(r"(?P<m>\d+)(?::(?P<s>\d{1,2}))?")


def seconds(text: str) -> int:
    """Seconds of a time limit in one of SLURM's forms: `4:00` is four minutes, `2-12` two and a half days.

    Raises ValueError for anything else, for zero, and for `UNLIMITED`: a run without a limit gets no warning before
    its partition's limit ends it.
    """
    match = next((found for form in (_DAYS, _HOURS, _MINUTES) if (found := form.fullmatch(text.strip()))), None)
    if match is None:
        raise ValueError(f"is not a time limit; write {FORMS}")
    parts = {unit: int(value) for unit, value in match.groupdict().items() if value is not None}
    limits = {"h": 23, "m": 59, "s": 59}
    first = next(iter(parts))
    for unit, value in parts.items():
        if unit != first and value > limits[unit]:
            name = {"h": "hours", "m": "minutes", "s": "seconds"}[unit]
            raise ValueError(f"is not a time limit: {value} {name} after another unit; write {FORMS}")
    total = sum(parts.get(unit, 0) * size for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)))
    if total == 0:
        raise ValueError("is a time limit of zero")
    return total


def text(limit: int) -> str:
    """A time limit of so many seconds in the form that no reader can mistake: `12:00:00`, `3-00:00:00`."""
    days, rest = divmod(limit, 86400)
    hours, rest = divmod(rest, 3600)
    clock = f"{hours:02}:{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def _canonical(value: str) -> str:
    return text(seconds(value))


TimeLimit = Annotated[str, AfterValidator(_canonical)]
"""A configuration field: accepts every form, holds H:M:S or D-H:M:S."""
