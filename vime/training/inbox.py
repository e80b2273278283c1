"""The messages to the trainer, as rank 0 takes them from the control plane."""

from __future__ import annotations

from collections import deque

from vime.buffer.control import BatchMessage, Control, EngineMessage, StopMessage


class Inbox:
    """Messages in the order in which they were posted, except that a request to stop overtakes batches that wait."""

    def __init__(self, control: Control, timeout: float) -> None:
        """timeout: seconds that a message may take."""
        self._control = control
        self._timeout = timeout
        self._taken = 0
        self._waiting: deque[BatchMessage | EngineMessage | StopMessage] = deque()

    def next(self, what: str) -> BatchMessage | EngineMessage | StopMessage:
        """The next message. Raises WaitTimeout naming `what` when none came in time."""
        while self._taken < self._control.posted():
            self._waiting.append(self._take(what))
        for message in self._waiting:
            if isinstance(message, StopMessage):
                return message
        return self._waiting.popleft() if self._waiting else self._take(what)

    def _take(self, what: str) -> BatchMessage | EngineMessage | StopMessage:
        message = self._control.next_message(self._taken, self._timeout, what)
        self._taken += 1
        return message
