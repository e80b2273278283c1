"""A process that ends like a power switch at a chosen change to the filesystem."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def forked(calls: int, work: Callable[[], object]) -> int:
    """The pid of a child that does `work`, and ends like a power switch before its `calls`-th change to files."""
    child = os.fork()
    if child:
        return child
    left = calls

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return function(*arguments, **named)

        return call

    for name in ("write", "fsync", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into pytest
        traceback.print_exception(error)
        os._exit(1)
    os._exit(0)
