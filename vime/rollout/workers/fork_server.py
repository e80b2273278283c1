"""The process that the workers are forked from: it has imported what they need, runs one thread and no user's code.

The generator starts it and holds the other end of its pipe. Over it go the ends of the workers' pipes, and orders to
end one; back comes how a worker ended. When the pipe closes, all end.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.rollout.workers.frames import read_frame, write_frame
from vime.rollout.workers.sandbox import confine, isolate
from vime.rollout.workers.worker import Worker, children, import_function
from vime.run.role import become_subreaper, die_with_parent

FORK, KILL = 0, 1
"""First number of an order; the second is the worker's."""


@dataclass(frozen=True)
class Start:
    """What a fork server is told first."""

    sandboxed: bool
    """It is for hostile input. Its working directory is the one folder that it may write to while it loads."""
    prepare: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Functions of vime's and their arguments, called before the first fork so that each worker has what they load."""


def main() -> None:
    """`python -m vime.rollout.workers.fork_server DESCRIPTOR`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    request = read_frame(control.fileno())
    if request is None:
        return
    start: Start = pickle.loads(request)  # noqa: S301 - from the generator that started this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's, which ends the generator
    isolation: list[str] = []
    if start.sandboxed:
        isolation = isolate(Path.cwd())
        if "process" in isolation:  # only a child is in that namespace, as its first process
            _enter_pid_namespace()
    become_subreaper()
    try:
        for path, arguments in start.prepare:
            import_function(path)(**arguments)
    except Exception as error:  # noqa: BLE001 - the generator says it
        write_frame(control.fileno(), json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    write_frame(control.fileno(), json.dumps({"ready": isolation}).encode())
    _serve(control, start.sandboxed)


def _enter_pid_namespace() -> None:
    child = os.fork()
    if child:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        os._exit(0)
    die_with_parent(0)  # the number of a parent outside


def _serve(control: socket.socket, sandboxed: bool) -> None:
    workers: dict[int, int] = {}
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    while True:
        readable, _, _ = select.select([control.fileno(), wake], [], [])
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            _reap(control, workers)
        if control.fileno() not in readable:
            continue
        order, pipes, _, _ = socket.recv_fds(control, 8, 1)
        if len(order) < 8:
            break
        kind, number = int.from_bytes(order[:4], "big"), int.from_bytes(order[4:], "big")
        if kind == FORK:
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (wake, waker):
                    os.close(descriptor)
                control.close()
                _work(pipes[0], sandboxed)
            workers[number] = pid
            os.close(pipes[0])
        elif number in workers:
            os.kill(workers[number], signal.SIGKILL)
    _end_all()


def _work(pipe: int, sandboxed: bool) -> None:
    code = 1
    try:
        if sandboxed:
            confine()
        else:
            become_subreaper()
            signal.signal(signal.SIGINT, signal.default_int_handler)
        Worker(pipe, limited=sandboxed).serve()
        code = 0
    except OSError:
        pass  # the generator is gone
    finally:
        os._exit(code)


def _reap(control: socket.socket, workers: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            break
        for number in [number for number, worker in workers.items() if worker == pid]:
            del workers[number]
            said = {"ended": number, "code": os.waitstatus_to_exitcode(status)}
            write_frame(control.fileno(), json.dumps(said).encode())
    # What an ended worker had started is now a child of this process.
    for pid in children() - set(workers.values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _end_all() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while left := children():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
