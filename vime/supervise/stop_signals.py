"""Requests to stop that reach the supervisor as signals, taken one at a time instead of by handlers.

The signals are blocked and then fetched, so nothing is ever interrupted half-way, and an ended child wakes the
supervisor at once.
"""

from __future__ import annotations

import os
import signal

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCHLD)


class Stopped(Exception):
    """Someone asked the run to stop."""

    def __init__(self, signum: signal.Signals, orphaned: bool) -> None:
        super().__init__("the guardian ended" if orphaned else f"stopped by {signum.name}")
        self.signum = signum
        self.orphaned = orphaned
        """The guardian is gone: nobody asked, it was killed."""


class StopSignals:
    """Blocks the stop signals in this thread and in every thread started later. Make it before importing torch.

    `parent` is the guardian's pid, for one that ended before this was made.
    """

    def __init__(self, parent: int | None = None) -> None:
        self._parent = os.getppid() if parent is None else parent
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

    def wait(self, timeout: float) -> None:
        """Return when a child has ended or after `timeout` seconds. Raises Stopped when a stop signal has come."""
        received = signal.sigtimedwait(WATCHED, timeout)
        if received is not None and received.si_signo != signal.SIGCHLD:
            raise Stopped(signal.Signals(received.si_signo), orphaned=os.getppid() != self._parent)
