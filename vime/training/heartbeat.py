"""A rank's sign of life: when a collective ends without one of its ranks, the supervisor learns here which it was."""

from __future__ import annotations

import threading
import time

from vime.buffer.control import Beat, Control
from vime.errors import BadMessage, ControlLost
from vime.run.directory import node_name

BEAT_SECONDS = 10.0
"""Between two signs of life: at 4096 ranks the store is told 400 times a second, and nobody reads while all is well."""


class Heartbeat:
    """Tells the store, from a thread of its own, that this rank runs and where it stands."""

    def __init__(self, control: Control, rank: int, interval: float = BEAT_SECONDS) -> None:
        """control: a connection for this alone."""
        self._control, self._rank, self._interval = control, rank, interval
        self._node = node_name()
        self._place, self._since = "its start", time.time()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        self._thread.start()

    def at(self, place: str) -> None:
        """Where this rank stands from now on, in words that follow "it stood at"."""
        self._place, self._since = place, time.time()

    def close(self) -> None:
        """No further signs."""
        self._over.set()
        self._thread.join(self._interval)

    def _beat(self) -> None:
        while True:
            beat = Beat(time=time.time(), node=self._node, place=self._place, since=self._since)
            try:
                self._control.beat("trainer", self._rank, beat)
            except (ControlLost, BadMessage):
                return  # the run has ended
            if self._over.wait(self._interval):
                return
