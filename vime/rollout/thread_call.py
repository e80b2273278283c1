"""A call of blocking code from asyncio that may hang without keeping the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def call_in_thread(function: Callable[[], T], timeout: float) -> T:
    """Runs `function` in a daemon thread of its own. Raises TimeoutError after `timeout` seconds.

    A thread cannot be killed: one that hangs is left behind, and costs a core if it computes.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        try:
            value, error = function(), None
        except Exception as raised:  # noqa: BLE001 - handed to the caller
            value, error = None, raised
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            pass  # the loop has ended; nobody waits any more

    threading.Thread(target=run, daemon=True, name="vime-call").start()
    return await asyncio.wait_for(result, timeout)
