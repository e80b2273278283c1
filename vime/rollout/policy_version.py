"""The policy version that the engines serve, followed beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vime.buffer.control import Control
from vime.errors import WaitTimeout

POLL_SECONDS = 1.0
"""One wait at the store: how long the end of the process may be held up by it."""


class PolicyVersion:
    """Knows the version that is served. `on_change` is called, in the event loop, whenever it grows."""

    def __init__(self, version: int = -1) -> None:
        self.version = version
        self.on_change: Callable[[], None] = lambda: None
        self._grown = asyncio.Event()
        self._failure: Exception | None = None

    async def follow(self, control: Control, last: int) -> None:
        """Follow the store until version `last`. `control` is used by nobody else meanwhile.

        An error of the store is raised by `reach`.
        """
        while self.version < last and self._failure is None:
            try:
                self.set(await asyncio.to_thread(control.wait_version, self.version + 1, POLL_SECONDS))
            except WaitTimeout:
                pass  # `reach` bounds the wait
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                self._failure = error
                self._grown.set()

    def set(self, version: int) -> None:
        """The engines serve `version` now."""
        self.version = version
        self._grown.set()
        self._grown = asyncio.Event()
        self.on_change()

    async def reach(self, version: int, timeout: float) -> None:
        """Wait until `version` is served. Raises WaitTimeout after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self.version < version:
                    if self._failure is not None:
                        raise self._failure
                    await self._grown.wait()
        except TimeoutError as error:
            raise WaitTimeout(f"waited {timeout:g} s for policy version {version} from the trainer") from error
