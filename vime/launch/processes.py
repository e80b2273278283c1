"""The processes of one attempt: started in groups of their own, watched, and ended within a bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.launch.commands import Command
from vime.launch.process_tree import kill_descendants, reap_orphans, signal_group
from vime.role import die_with_parent
from vime.run_dir import utc_now

KILL_TIMEOUT = 3.0
"""Seconds the kernel gets to end processes that were sent SIGKILL."""


@dataclass(frozen=True)
class End:
    """How one process ended. Exactly one of `exit_code` and `signal` is set."""

    command: Command
    exit_code: int | None
    signal: str | None
    time: str
    seconds: float
    """When, by the monotonic clock."""
    log: Path

    @property
    def succeeded(self) -> bool:
        """Whether this is how a role that finishes should end."""
        return self.exit_code == 0 and self.command.finishes

    def __str__(self) -> str:
        how = f"exit code {self.exit_code}" if self.signal is None else self.signal
        return f"{self.command.name} ended with {how}"


@dataclass(frozen=True)
class RoleProcess:
    """One process that runs."""

    command: Command
    popen: subprocess.Popen[bytes]
    log: Path

    def poll(self) -> End | None:
        """How it ended, or None while it runs. What an ended process left in its group is killed."""
        pid = self.popen.pid
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # Before the pid is collected, because after that it could name another group.
        signal_group(pid, signal.SIGKILL)
        code = self.popen.wait()
        name = signal_name(-code) if code < 0 else None
        return End(self.command, None if code < 0 else code, name, utc_now(), time.monotonic(), self.log)


class Processes:
    """All processes of one attempt. Main thread only: the kernel ends a role with the thread that started it."""

    def __init__(self) -> None:
        self.running: list[RoleProcess] = []

    def start(self, command: Command, environment: Mapping[str, str], log: Path) -> None:
        """Start `command` with exactly `environment`, in a process group of its own, writing to `log`.

        Raises OSError when the program cannot be started.
        """
        supervisor = os.getpid()

        def before_exec() -> None:
            die_with_parent(supervisor)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            popen = subprocess.Popen(
                command.argv,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=before_exec,
            )
        self.running.append(RoleProcess(command, popen, log))

    def poll(self) -> list[End]:
        """The processes that ended since the last call. Each is said in the supervisor's log."""
        ends = []
        for process in list(self.running):
            end = process.poll()
            if end is not None:
                self.running.remove(process)
                ends.append(end)
                print(f"{end.time} {end}", flush=True)
        reap_orphans(frozenset(process.popen.pid for process in self.running))
        return ends

    def stop(self, timeout: float) -> list[int]:
        """End everything: TERM to each group, KILL after `timeout` seconds, KILL to whatever else runs below.

        Returns the pids of what survived even that (a process stuck in the kernel). Takes at most `timeout` +
        2 x KILL_TIMEOUT seconds.
        """
        for process in self.running:
            signal_group(process.popen.pid, signal.SIGTERM)
        self._wait(timeout)
        for process in self.running:
            signal_group(process.popen.pid, signal.SIGKILL)
        self._wait(KILL_TIMEOUT)
        left = kill_descendants(os.getpid(), KILL_TIMEOUT)
        reap_orphans(frozenset())
        return left

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            self.poll()
            if not self.running or time.monotonic() > deadline:
                return
            time.sleep(0.02)


def signal_name(number: int) -> str:
    """SIGKILL for 9; SIG<number> for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
