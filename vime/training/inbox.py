"""The messages to the trainer, as rank 0 takes them from the control plane."""

from __future__ import annotations

from collections import deque

from vime.buffer.control import BatchMessage, Control, EngineMessage, StopMessage

RANK_0_MARGIN = 60.0
"""Seconds that other ranks wait longer than rank 0 does, so that its own words are the ones in the log."""
TrainerMessage = BatchMessage | EngineMessage | StopMessage


class Inbox:
    """Messages in the order in which they were posted. A request to stop overtakes all that wait, and stays."""

    def __init__(self, control: Control, timeout: float) -> None:
        """timeout: seconds that a message may take."""
        self._control = control
        self._timeout = timeout
        self._taken = 0
        self._waiting: deque[TrainerMessage] = deque()
        self._stop: StopMessage | None = None

    def next(self, what: str, only: type[TrainerMessage] | None = None) -> TrainerMessage:
        """The request to stop when there is one, else the next message (of type `only`).

        Raises WaitTimeout naming `what` when none came in time.
        """
        while self._taken < self._control.posted():
            self._take(what)
        while self._stop is None:
            for message in self._waiting:
                if only is None or isinstance(message, only):
                    self._waiting.remove(message)
                    return message
            self._take(what)
        return self._stop

    def _take(self, what: str) -> None:
        message = self._control.next_message(self._taken, self._timeout, what)
        self._taken += 1
        if message is None:
            return  # a stranger's
        if isinstance(message, StopMessage):
            self._stop = message
        else:
            self._waiting.append(message)
