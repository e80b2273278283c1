"""Calls of functions that the user wrote: apart from the event loop that serves requests, within a time limit.

A blocking function runs in a daemon thread, of which there are at most `threads` at work; an async one runs in an event
loop of its own thread, so that one that blocks it by mistake holds up no request. A thread cannot be killed: what hangs
is left behind, and when too much has been left behind the run ends and says so.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vime.errors import UserError

MAX_ABANDONED = 64
"""Calls that may hang for ever before the run ends."""
BLOCKED_SECONDS = 2.0
"""An event loop that does nothing for so long after a call's time is over is blocked by that call."""

_Outcome = tuple[Any, BaseException | None]
"""What a call returned, or what it raised: a future cannot carry StopIteration or SystemExit."""


class CallFailed(Exception):
    """A function of the user's raised, or took too long. The text names the function and what happened."""


class CallTookTooLong(CallFailed):
    """It was cut off by its time limit."""


class UserCalls:
    """Runs the user's functions. `threads`: blocking calls at work at once. `close` lets go of what still runs."""

    def __init__(self, threads: int) -> None:
        self._slots = asyncio.Semaphore(threads)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._abandoned = 0
        self._printed: set[tuple[str, ...]] = set()

    async def call(self, name: str, function: Callable[..., Any], timeout: float, what: str, **arguments: Any) -> Any:
        """`function(**arguments)`, awaited when it is async, for at most `timeout` seconds of its own time.

        `name` is its import path; `what` says on which sample, for what each new kind of failure leaves on stderr.
        Raises CallFailed for whatever the function raises, SystemExit and StopIteration too; CallTookTooLong when the
        time is over; UserError as it is, and when more than MOST_ABANDONED calls hang.
        """
        function = functools.partial(function, **arguments)
        if is_async(function):
            return await self._in_loop(name, function, timeout, what)
        async with self._slots:
            return await self._in_thread(name, function, timeout, what)

    async def call_again(
        self, tries: int, name: str, function: Callable[..., Any], timeout: float, what: str, **arguments: Any
    ) -> Any:
        """`call`, up to `tries` times (at least 1) while it raises. One that hangs would only hang again.

        Raises what `call` does, of the last try.
        """
        for _ in range(tries - 1):
            try:
                return await self.call(name, function, timeout, what, **arguments)
            except CallTookTooLong:
                raise
            except CallFailed:
                pass  # its traceback is on stderr
        return await self.call(name, function, timeout, what, **arguments)

    def close(self) -> None:
        """Ends the loop of async functions; threads that hang die with the process."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def _in_thread(self, name: str, function: Callable[[], Any], timeout: float, what: str) -> Any:
        future: Future[_Outcome] = Future()
        threading.Thread(target=_settle, args=(future, function), daemon=True, name=f"vime {name}").start()
        done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=timeout)
        if not done:
            self._abandon(name, timeout)
            future.add_done_callback(self._returned)
            raise self._too_long(name, timeout, what)
        return self._result(future.result(), name, what)

    async def _in_loop(self, name: str, function: Callable[[], Any], timeout: float, what: str) -> Any:
        loop = self._loop = self._loop or _start_loop()
        future = asyncio.run_coroutine_threadsafe(_caught(function), loop)
        wrapped = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([wrapped], timeout=timeout)
        except asyncio.CancelledError:
            future.cancel()
            raise
        if not done:
            future.cancel()
            if self._loop is loop and not await _alive(loop):
                self._loop = None  # the next call starts another
                self._abandon(name, timeout)
            raise self._too_long(name, timeout, what)
        return self._result(wrapped.result(), name, what)

    def _result(self, outcome: _Outcome, name: str, what: str) -> Any:
        value, error = outcome
        if error is None:
            return value
        if isinstance(error, UserError):
            raise error
        frames = traceback.extract_tb(error.__traceback__)
        place = (frames[-1].filename, str(frames[-1].lineno)) if frames else ()
        shown = "".join(traceback.format_exception(error))
        head = f"{name} failed on {what} (further failures at this place are only counted):"
        self._print_once((name, type(error).__name__, *place), f"{head}\n{shown}")
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        raise CallFailed(f"{name} raised {text}") from error

    def _too_long(self, name: str, timeout: float, what: str) -> CallTookTooLong:
        text = f"{name} took more than {timeout:g} s"
        self._print_once((name, "too long"), f"{text} on {what} (further calls that do are only counted)")
        return CallTookTooLong(text)

    def _print_once(self, kind: tuple[str, ...], text: str) -> None:
        if kind not in self._printed:
            self._printed.add(kind)
            print(text, file=sys.stderr)

    def _abandon(self, name: str, timeout: float) -> None:
        self._abandoned += 1
        if self._abandoned > MAX_ABANDONED:
            raise UserError(f"{name}: {MAX_ABANDONED} calls hang, each for more than its limit of {timeout:g} s")

    def _returned(self, future: Future[Any]) -> None:
        self._abandoned -= 1


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await: an async function, a partial of one, or an object whose call is."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - of an object whose call is async
    )


def _settle(future: Future[_Outcome], function: Callable[[], Any]) -> None:
    try:
        future.set_result((function(), None))
    except BaseException as error:  # noqa: BLE001 - SystemExit of a reward ends the sample, not the thread's work
        future.set_result((None, error))


async def _caught(function: Callable[[], Any]) -> _Outcome:
    try:
        return await function(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit would end the loop
        return None, error


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="vime async calls").start()
    return loop


async def _alive(loop: asyncio.AbstractEventLoop) -> bool:
    answered: Future[None] = Future()
    loop.call_soon_threadsafe(answered.set_result, None)
    done, _ = await asyncio.wait([asyncio.wrap_future(answered)], timeout=BLOCKED_SECONDS)
    return bool(done)
