"""The processes of one attempt: started in groups of their own, watched, and ended within a bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vime.run.directory import node_name, utc_now
from vime.run.role import die_with_parent
from vime.supervise.commands import Command
from vime.supervise.process_tree import kill_descendants, reap_orphans, signal_group

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
    rank: int = 0
    node: str = field(default_factory=node_name)
    stopped: bool = False
    """The scheduler ends the job, or this step, and with it this rank. The cause when the supervisor hears no more."""

    @property
    def succeeded(self) -> bool:
        """Whether this is how a role that finishes should end."""
        return self.exit_code == 0 and self.command.finishes

    def __str__(self) -> str:
        how = f"exit code {self.exit_code}" if self.signal is None else self.signal
        return f"{self.command.role}-{self.rank} on {self.node} ended with {how}"


class Running(Protocol):
    """One process that this supervisor started: a role's own, or the srun of all its ranks."""

    command: Command
    popen: subprocess.Popen[bytes]

    def poll(self) -> tuple[list[End], bool]:
        """Ends learnt since the last call, and whether the process itself has ended."""
        ...

    def ask_to_stop(self) -> None:
        """Give the role its chance to stop by itself."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...


@dataclass
class RoleProcess:
    """A role's process on this machine."""

    command: Command
    popen: subprocess.Popen[bytes]
    log: Path

    def poll(self) -> tuple[list[End], bool]:
        """As `Running`. What an ended process left in its group is killed."""
        code = collect(self.popen)
        if code is None:
            return [], False
        name = signal_name(-code) if code < 0 else None
        exit_code = None if code < 0 else code
        rank = self.command.rank or 0
        return [End(self.command, exit_code, name, utc_now(), time.monotonic(), self.log, rank)], True

    def ask_to_stop(self) -> None:
        """TERM to its group."""
        signal_group(self.popen.pid, signal.SIGTERM)

    def kill(self) -> None:
        """KILL to its group."""
        signal_group(self.popen.pid, signal.SIGKILL)


class Processes:
    """All processes of one attempt. Main thread only: the kernel ends a role with the thread that started it."""

    def __init__(self) -> None:
        self.running: list[Running] = []

    def start(self, command: Command, environment: Mapping[str, str], log: Path) -> None:
        """Start `command` with exactly `environment`, in a process group of its own, writing to `log`.

        Raises OSError when the program cannot be started.
        """
        self.running.append(RoleProcess(command, spawn(command.argv, environment, log), log))

    def poll(self) -> list[End]:
        """The ends that were learnt since the last call. Each is said in the supervisor's log."""
        ends = []
        for process in list(self.running):
            learnt, ended = process.poll()
            if ended:
                self.running.remove(process)
            for end in learnt:
                print(f"{end.time} {end}", flush=True)
            ends += learnt
        reap_orphans(frozenset(process.popen.pid for process in self.running))
        return ends

    def stop(self, timeout: float) -> list[int]:
        """End everything: TERM to each group, KILL after `timeout` seconds, KILL to whatever else runs below.

        Returns the pids of what survived even that (a process stuck in the kernel). Takes at most `timeout` +
        2 x KILL_TIMEOUT seconds.
        """
        for process in self.running:
            process.ask_to_stop()
        self._wait(timeout)
        for process in self.running:
            process.kill()
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


def spawn(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program with exactly `environment`, in a process group of its own that ends with this process.

    It reads nothing and appends what it prints to `log`. Raises OSError when it cannot be started.
    """
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=before_exec,
        )


def collect(popen: subprocess.Popen[bytes]) -> int | None:
    """The return code of an ended process, whose group is killed; None while it runs."""
    if os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    # Before the pid is collected, because after that it could name another group.
    signal_group(popen.pid, signal.SIGKILL)
    return popen.wait()


def signal_name(number: int) -> str:
    """SIGKILL for 9; SIG<number> for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
