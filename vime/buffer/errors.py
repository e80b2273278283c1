"""What can be wrong with the buffer, apart from a wait that ran out (`vime.errors.WaitTimeout`)."""

from __future__ import annotations


class ControlLost(ConnectionError):
    """The store of the run does not answer any more: the supervisor that hosts it has ended."""


class BadMessage(Exception):
    """A value in the store is not of the shape that its key promises."""


class BufferFault(Exception):
    """A file of the buffer cannot be written, or is not what was committed. The message names the file."""
