"""The two errors that every part of vime shares."""


class UserError(Exception):
    """Something a person gave was wrong. Its text is one line: what, where, and the nearest right value.

    `launch.py` prints it and ends with exit code 2, before anything is submitted or written.
    """


class WaitTimeout(TimeoutError):
    """A bounded wait ran out. Its text names what was waited for and for how long."""
