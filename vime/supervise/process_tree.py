"""What runs below this process, read from /proc, and how to end all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def descendants(root: int) -> list[int]:
    """Pids of the live processes below `root`, zombies left out. A process that ends meanwhile may be missing."""
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name in parentheses may hold anything, also spaces and parentheses.
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        pid = int(entry.name)
        children.setdefault(int(parent), []).append(pid)
        if state in b"ZX":
            zombies.add(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return [pid for pid in found if pid not in zombies]


def kill_descendants(root: int, timeout: float) -> list[int]:
    """Kill whatever runs below `root` until nothing does; returns what was left after `timeout` seconds.

    `root` must be a subreaper (`vime.run.role.become_subreaper`), or a process that was orphaned escapes.
    """
    deadline = time.monotonic() + timeout
    while left := descendants(root):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def signal_group(group: int, signum: signal.Signals) -> None:
    """Send `signum` to every process of a group; a group that has ended is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def reap_orphans(own: frozenset[int]) -> None:
    """Collect ended orphans that this subreaper adopted, but not the children in `own`, which others wait for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        # Another ended child may hide behind one of `own`; it is found when that one has been collected.
        if ended is None or ended.si_pid in own:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)
