"""Requests to stop that reach the supervisor as signals, taken one at a time instead of by handlers.

The signals are blocked and then fetched, so nothing is ever interrupted half-way, and an ended child wakes the
supervisor at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCHLD)


def next_signal(watched: Collection[signal.Signals], timeout: float) -> signal.Signals | None:
    """The next of the blocked signals `watched`; None when none came in `timeout` seconds.

    A process that was stopped and continues (`scontrol suspend`) interrupts the call, and CPython then returns what lay
    in memory when the time is over: a number that was not asked for is no signal.
    """
    received = signal.sigtimedwait(watched, timeout)
    return next((known for known in watched if received is not None and known == received.si_signo), None)


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
        received = next_signal(WATCHED, timeout)
        if received not in (None, signal.SIGCHLD):
            raise Stopped(received, orphaned=os.getppid() != self._parent)
