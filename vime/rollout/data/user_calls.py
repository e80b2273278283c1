"""Calls of functions that the user wrote: apart from the event loop that serves requests, within a time limit.

A blocking function runs in a worker process, which is ended when the call takes too long, and with it what the call has
started. An async one, and what needs the generator's own state, runs in an event loop of its own thread here, so that
one that blocks that loop by mistake holds up no request. A thread cannot be ended: what hangs there is left behind, and
when too much has been left behind the run ends and says so.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vime.errors import UserError
from vime.rollout.data.results import NotUsable
from vime.rollout.workers.pool import Stopped, TookTooLong, Unsendable, Workers
from vime.rollout.workers.worker import Raised, describe

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


def worker_count(configured: int | None) -> int:
    """`rollout.reward_workers`, or its default: a quarter of the cores that this process may use."""
    return configured or max(1, len(os.sched_getaffinity(0)) // 4)


class UserCalls:
    """Runs the user's functions, and the scorers that read what the policy wrote. `close` ends what still runs."""

    def __init__(self, workers: int) -> None:
        """workers: processes for the user's functions, and as many for vime's own scorers."""
        self.scoring = Workers(workers, sandboxed=True)
        """For vime's own scorers: what they read is hostile."""
        self._workers = Workers(workers, sandboxed=False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._abandoned = 0
        self._printed: set[tuple[str, ...]] = set()

    def give_each_call(self, name: str, **constants: Any) -> None:
        """Arguments of every call of the blocking function `name`, which are sent to each worker once."""
        self._workers.constants[name] = constants

    def import_for_calls(self, module: str) -> None:
        """Has a module in each worker from the start, such as that of the arguments' types. Before the first call."""
        self._workers.prepare.append(("importlib:import_module", {"name": module}))

    async def call(
        self,
        name: str,
        function: Callable[..., Any],
        timeout: float,
        what: str,
        returns: Callable[[Any], Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """`function(**arguments)`, awaited when it is async, for at most `timeout` seconds of its own time.

        `name` is its import path, by which a worker finds it; `what` says on which sample, for what each new kind of
        failure leaves on stderr. `returns` makes plain what it returned: see `results`.
        Raises CallFailed for whatever the function raises, SystemExit and StopIteration too, and for arguments that
        cannot be sent to a worker; CallTookTooLong when the time is over; UserError as it is, and when more than
        MAX_ABANDONED calls hang.
        """
        if is_async(function):
            return await self._in_loop(name, functools.partial(function, **arguments), timeout, what, returns)
        try:
            value, failed = await self._workers.call(name, arguments, timeout, returns)
        except Unsendable as error:
            raise CallFailed(f"{name} was not called: {error}") from error
        return self._settled(value, failed, name, what)

    async def call_again(
        self,
        tries: int,
        name: str,
        function: Callable[..., Any],
        timeout: float,
        what: str,
        returns: Callable[[Any], Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """`call`, up to `tries` times (at least 1) while it raises. One that hangs would only hang again.

        Raises what `call` does, of the last try.
        """
        for _ in range(tries - 1):
            try:
                return await self.call(name, function, timeout, what, returns, **arguments)
            except CallTookTooLong:
                raise
            except CallFailed:
                pass  # its traceback is on stderr
        return await self.call(name, function, timeout, what, returns, **arguments)

    def close(self) -> None:
        """Ends the workers and the loop of async functions; a thread that hangs dies with the process."""
        self._workers.close()
        self.scoring.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def _in_loop(
        self,
        name: str,
        function: Callable[[], Any],
        timeout: float,
        what: str,
        returns: Callable[[Any], Any] | None,
    ) -> Any:
        loop = self._loop = self._loop or _start_loop()
        future = asyncio.run_coroutine_threadsafe(_caught(function, returns), loop)
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
            return self._settled(None, TookTooLong(f"took more than {timeout:g} s"), name, what)
        value, error = wrapped.result()
        if isinstance(error, UserError):
            raise error
        return self._settled(value, None if error is None else describe(error), name, what)

    def _settled(self, value: Any, failed: Raised | Stopped | None, name: str, what: str) -> Any:
        """The value of a call, or its failure: raised, and said on stderr when it is the first of its kind."""
        if failed is None:
            return value
        if isinstance(failed, TookTooLong):
            text = f"{name} {failed}"
            self._print_once((name, "too long"), f"{text} on {what} (further calls that do are only counted)")
            raise CallTookTooLong(text)
        if isinstance(failed, Stopped):
            self._print_once((name, str(failed)), f"{name} {failed} on {what} (further calls that do are only counted)")
            raise CallFailed(f"{name} {failed}")
        if failed.type == NotUsable.__name__:
            raise CallFailed(f"{name} {failed.text}")
        if failed.user_error:
            raise UserError(failed.text)
        head = f"{name} failed on {what} (further failures at this place are only counted):"
        self._print_once((name, failed.type, *failed.place), f"{head}\n{failed.traceback}")
        raise CallFailed(f"{name} raised {f'{failed.type}: {failed.text}'.rstrip(': ')}")

    def _print_once(self, kind: tuple[str, ...], text: str) -> None:
        if kind not in self._printed:
            self._printed.add(kind)
            print(text, file=sys.stderr)

    def _abandon(self, name: str, timeout: float) -> None:
        self._abandoned += 1
        if self._abandoned > MAX_ABANDONED:
            raise UserError(f"{name}: {MAX_ABANDONED} calls hang, each for more than its limit of {timeout:g} s")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await: an async function, a partial of one, or an object whose call is."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - of an object whose call is async
    )


async def _caught(function: Callable[[], Any], returns: Callable[[Any], Any] | None) -> _Outcome:
    try:
        value = await function()
        return (value if returns is None else returns(value)), None
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
