"""What a worker process does: it calls the functions that the generator names, one after the other."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vime.errors import UserError
from vime.rollout.workers.frames import read_frame, write_frame

MAX_TEXT = 10_000
"""Characters of an exception that cross."""


@dataclass(frozen=True)
class Request:
    """Calls of one function, each with an item's own arguments besides the shared ones."""

    function: str
    """module:function"""
    shared: dict[str, Any]
    items: list[dict[str, Any]]
    returns: Callable[[Any], Any] | None = None
    """Makes what the function returned plain: called in the worker, where that object lives."""
    seconds: float = 60.0
    """Time of one call. The generator watches it; where CPU time is limited it sets the limit too."""


@dataclass(frozen=True)
class Load:
    """Imports a function before its first call, so that the import does not count as the call's time."""

    function: str
    constants: dict[str, Any] = field(default_factory=dict)
    """Arguments that each of its calls gets, such as a tokenizer: sent once."""


@dataclass(frozen=True)
class Raised:
    """What a function raised, in plain values."""

    type: str
    text: str
    traceback: str
    place: tuple[str, ...]
    """File and line."""
    user_error: bool


class Worker:
    """The loop of one worker process on its end of a pipe."""

    def __init__(self, pipe: int, limited: bool) -> None:
        """limited: a call that goes on too long is ended by the kernel, even when no generator is left to do it."""
        self._pipe = pipe
        self._limited = limited
        self._functions: dict[str, Callable[..., Any]] = {}
        self._constants: dict[str, dict[str, Any]] = {}
        self._kept: set[int] = set()

    def serve(self) -> None:
        """Answers requests until the generator closes the pipe."""
        while (request := read_frame(self._pipe)) is not None:
            asked = pickle.loads(request)  # noqa: S301 - from the generator that started this process
            if isinstance(asked, Load):
                write_frame(self._pipe, _answer(partial(self._load, asked), None))
                self._kept |= children()
                continue
            for item in asked.items:
                if self._limited:
                    _limit_time(asked.seconds)
                reply = _answer(partial(self._call, asked, item), asked.returns)
                self._end_children()
                write_frame(self._pipe, reply)

    def _load(self, load: Load) -> None:
        self._constants[load.function] = load.constants
        self._functions[load.function] = import_function(load.function)

    def _call(self, request: Request, item: dict[str, Any]) -> Any:
        constants = self._constants.get(request.function, {})
        return self._functions[request.function](**constants, **request.shared, **item)

    def _end_children(self) -> None:
        """Ends what the call has started and left running. Orphans of it are children of this process too."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # one that has ended
            while started := children() - self._kept:
                for pid in started:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def import_function(path: str) -> Callable[..., Any]:
    """The function that module:function names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _answer(call: Callable[[], Any], returns: Callable[[Any], Any] | None) -> bytes:
    try:
        value = call()
        return json.dumps({"value": value if returns is None else returns(value)}).encode()
    except BaseException as error:  # noqa: BLE001 - SystemExit of a reward fails its sample, not the worker
        return json.dumps({"raised": asdict(describe(error))}).encode()


def describe(error: BaseException) -> Raised:
    """An exception of the user's. One whose own text raises is described by its type."""
    place_of = error.__traceback__
    while place_of is not None and place_of.tb_frame.f_code.co_filename == __file__:
        place_of = place_of.tb_next
    frames = traceback.extract_tb(place_of)
    try:
        text, shown = str(error), "".join(traceback.format_exception(type(error), error, place_of))
    except BaseException:  # noqa: BLE001 - __str__ is the user's too
        text, shown = "", ""
    place = (frames[-1].filename, str(frames[-1].lineno)) if frames else ()
    return Raised(type(error).__name__, text[:MAX_TEXT], shown[-MAX_TEXT:], place, isinstance(error, UserError))


def children() -> set[int]:
    """The processes that this one has started, or that it got from one of them that ended."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in task.read_text().split()}
    return found


def _limit_time(seconds: float) -> None:
    """Bounds the CPU time of what comes: the kernel ends the process a moment after the generator would have."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime + seconds) + 2, hard))
