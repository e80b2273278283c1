"""One holder a run directory: what may begin its next attempt, so that two `--resume` at once do not both do so.

On one machine, and where the filesystem knows locks, a lock on a file of the folder decides, by whatever path the
folder was reached, and the kernel lets go of it with its process. A file that only one process can create does so
between login nodes whose filesystem knows none.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from vime.errors import UserError
from vime.run.directory import RunDir

LOCK = ".lock"
RESUMING = ".resuming"


@contextmanager
def held(run: RunDir) -> Iterator[None]:
    """Within it no other launcher begins an attempt of this run. Raises UserError when another is at it."""
    try:
        descriptor = os.open(run.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"{run.path} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run.path} is being resumed by another process at this moment") from None
        except OSError:
            pass  # this filesystem knows no locks
        _create(run)
        try:
            yield
        finally:
            (run.path / RESUMING).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _create(run: RunDir) -> None:
    path, me = run.path / RESUMING, f"{socket.gethostname()} {os.getpid()}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        host, _, pid = path.read_text().partition(" ")
        if host != socket.gethostname() or (pid.isdigit() and _runs(int(pid))):
            raise UserError(
                f"{run.path} is being resumed by process {pid or '?'} of {host or 'another node'}; remove {path} if"
                " there is no such process any more"
            ) from None
        path.write_text(me)  # a launcher of this node was killed here
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(me)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()
