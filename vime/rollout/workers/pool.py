"""Worker processes as the generator sees them: a call goes to a free one, and one that hangs is ended and replaced.

A worker does one call at a time, so that ending it costs no other call. None is started before it is needed; those that
are there stay, with what they have loaded. All belong to the event loop that makes the first call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.errors import UserError
from vime.rollout.workers.fork_server import FORK, KILL, Start
from vime.rollout.workers.frames import frame, next_frame
from vime.rollout.workers.worker import Load, Raised, Request
from vime.supervise.processes import signal_name

START_SECONDS = 300.0
"""Time to start the fork server, and to import a function's module."""
STOP_SECONDS = 2.0
SHORTEST = 4
"""Calls that go to one worker together, when there are so many: each trip costs the event loop a little."""
MAX_STARTS = 3
SECRETS = ("TOKEN", "API_KEY")
"""Variables VIME_... with such names are the run's own and reach no worker."""


class Stopped(Exception):
    """A call that gave nothing: its worker was ended. The text says why."""


class TookTooLong(Stopped):
    """Its time was over."""


Outcome = tuple[Any, Raised | Stopped | None]
"""What a call returned, or why there is nothing."""


@dataclass(eq=False)
class _Process:
    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ended: asyncio.Future[int]
    loaded: set[str] = field(default_factory=set)


class Workers:
    """A pool of at most `count` processes. `close` ends them."""

    def __init__(self, count: int, sandboxed: bool) -> None:
        """sandboxed: for hostile input, without environment, network and files to write; see `sandbox`."""
        self.prepare: list[tuple[str, dict[str, Any]]] = []
        """As `Start.prepare`; counts until the first call."""
        self.isolation: list[str] = []
        """Namespaces that the workers are in."""
        self.constants: dict[str, dict[str, Any]] = {}
        """Arguments by function, as `Load.constants`."""
        self._count = count
        self._sandboxed = sandboxed
        self._slots = asyncio.Semaphore(count)
        self._starting = asyncio.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._news: asyncio.Task[None] | None = None
        self._scratch: Path | None = None
        self._idle: list[_Process] = []
        self._alive: dict[int, _Process] = {}
        self._next = 0

    async def call(
        self,
        function: str,
        arguments: dict[str, Any],
        timeout: float,
        returns: Callable[[Any], Any] | None = None,
    ) -> Outcome:
        """As `map`, of one call."""
        return (await self.map(function, {}, [arguments], timeout, returns))[0]

    async def map(
        self,
        function: str,
        shared: dict[str, Any],
        items: Sequence[dict[str, Any]],
        timeout: float,
        returns: Callable[[Any], Any] | None = None,
    ) -> list[Outcome]:
        """`function(**shared, **item)` for each item, each within `timeout` seconds of its own time.

        Raises Unsendable for arguments that cannot leave this process, UserError when no worker can be had.
        """
        size = max(SHORTEST, math.ceil(len(items) / self._count))
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        if len(parts) == 1:
            return await self._part(function, shared, parts[0], timeout, returns)
        done = await asyncio.gather(*(self._part(function, shared, part, timeout, returns) for part in parts))
        return [outcome for part in done for outcome in part]

    def close(self) -> None:
        """Ends the workers and what they have started."""
        if self._news is not None:
            self._news.cancel()
            self._news = None
        for process in self._alive.values():
            with contextlib.suppress(RuntimeError):  # its event loop is closed, and with it the connection
                process.writer.transport.abort()
        self._alive.clear()
        self._idle.clear()
        if self._control is not None:
            self._control.close()  # the fork server ends its workers
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    async def _part(
        self,
        function: str,
        shared: dict[str, Any],
        items: Sequence[dict[str, Any]],
        timeout: float,
        returns: Callable[[Any], Any] | None,
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while len(outcomes) < len(items):
            async with self._slots:
                process = await self._take()
                good = False
                try:
                    if function not in process.loaded:
                        failed = await self._load(process, function)
                        if failed is not None:
                            good = isinstance(failed, Raised)
                            return [(None, failed)] * len(items)
                    request = Request(function, shared, list(items[len(outcomes) :]), returns, timeout)
                    good = True  # what cannot be sent does not harm it
                    content = _sent(request)
                    good = False
                    process.writer.write(frame(content))
                    good = await self._collect(process, len(request.items), timeout, outcomes)
                finally:
                    if good:
                        self._idle.append(process)
                    else:
                        self._end(process)
        return outcomes

    async def _collect(self, process: _Process, count: int, timeout: float, outcomes: list[Outcome]) -> bool:
        """Adds the outcomes of `count` calls. Returns False as soon as the worker is of no more use."""
        for _ in range(count):
            outcome = await self._answer(process, timeout)
            outcomes.append(outcome)
            if isinstance(outcome[1], Stopped):
                return False
        return True

    async def _answer(self, process: _Process, timeout: float) -> Outcome:
        try:
            async with asyncio.timeout(timeout):
                content = await next_frame(process.reader)
        except TimeoutError:
            return None, TookTooLong(f"took more than {timeout:g} s")
        except (EOFError, ConnectionError):
            return None, Stopped(await _end_of(process))
        except ValueError as error:
            return None, Stopped(str(error))
        try:
            answer = json.loads(content)
            if "raised" in answer:
                return None, Raised(**{**answer["raised"], "place": tuple(answer["raised"]["place"])})
            return answer["value"], None
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            return None, Stopped(f"its worker answered nonsense ({type(error).__name__})")

    async def _load(self, process: _Process, function: str) -> Raised | Stopped | None:
        constants = self.constants.get(function, {})
        process.writer.write(frame(pickle.dumps(Load(function, constants))))
        _, failed = await self._answer(process, START_SECONDS)
        if failed is None:
            process.loaded.add(function)
        return failed

    async def _take(self) -> _Process:
        """A worker for one call; those that ended while they were idle are not given out."""
        while self._idle:
            process = self._idle.pop()
            if not process.ended.done() and not process.reader.at_eof():
                return process
            self._end(process)
        for attempt in range(MAX_STARTS):
            try:
                return await self._fork()
            except (OSError, EOFError) as error:
                if attempt + 1 == MAX_STARTS:
                    raise UserError(f"the processes that score cannot be started: {error}") from error
        raise AssertionError("unreachable")

    async def _fork(self) -> _Process:
        async with self._starting:
            if self._control is None:
                await self._start()
        ours, theirs = socket.socketpair()
        number, self._next = self._next, self._next + 1
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            self._order(FORK, number, theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        process = _Process(number, reader, writer, ended)
        self._alive[number] = process
        return process

    async def _start(self) -> None:
        """The fork server. Raises UserError when it cannot load what it should, OSError or EOFError else."""
        ours, theirs = socket.socketpair()
        environment = {
            **_clean_environment(),
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        }
        if self._sandboxed:
            self._scratch = self._scratch or Path(tempfile.mkdtemp(prefix="vime-scoring-"))
            environment = _bare_environment(environment, self._scratch)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "vime.rollout.workers.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=self._scratch,
            )
        ours.sendall(frame(pickle.dumps(Start(self._sandboxed, tuple(self.prepare)))))
        # Reading is asyncio's, on a descriptor of its own; orders with descriptors are written to this one.
        reader, writer = await asyncio.open_unix_connection(sock=ours.dup())
        try:
            async with asyncio.timeout(START_SECONDS):
                said = json.loads(await next_frame(reader))
        except (TimeoutError, EOFError, ValueError) as error:
            writer.close()
            ours.close()
            raise OSError(f"its fork server said nothing: {type(error).__name__}") from error
        if "failed" in said:
            writer.close()
            ours.close()
            raise UserError(f"the processes that score cannot be started: {said['failed']}")
        self.isolation = said["ready"]
        self._control = ours
        self._news = asyncio.create_task(self._listen(reader, writer, ours))

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, control: socket.socket) -> None:
        """Hears how workers end, until the fork server does."""
        try:
            while True:
                news = json.loads(await next_frame(reader))
                process = self._alive.pop(news["ended"], None)
                if process is not None and not process.ended.done():
                    process.ended.set_result(news["code"])
        except (EOFError, ConnectionError, ValueError, LookupError):
            pass
        finally:
            writer.close()
            if self._control is control:
                control.close()
                self._control = None  # the next call starts another

    def _order(self, kind: int, number: int, pipe: socket.socket | None = None) -> None:
        if self._control is None:
            raise OSError("its fork server has ended")
        order = kind.to_bytes(4, "big") + number.to_bytes(4, "big")
        socket.send_fds(self._control, [order], [] if pipe is None else [pipe.fileno()])

    def _end(self, process: _Process) -> None:
        process.writer.transport.abort()
        try:
            self._order(KILL, process.number)
        except OSError:
            pass  # it ended with its fork server


class Unsendable(Exception):
    """An argument that cannot leave the generator's process. `name` is the argument's, with the key in it."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f"{name} cannot be sent to a worker process: {type(error).__name__}: {error}")
        self.name = name


def _sent(request: Request) -> bytes:
    try:
        return pickle.dumps(request)
    except Exception:
        for arguments in (request.shared, *request.items):
            for name, value in arguments.items():
                _require_sendable(name, value)
        raise


def _require_sendable(name: str, value: Any) -> None:
    try:
        pickle.dumps(value)
    except Exception as error:
        if isinstance(value, dict):  # which of its keys
            for key, one in value.items():
                _require_sendable(f"{name}[{key!r}]", one)
        raise Unsendable(name, error) from error


async def _end_of(process: _Process) -> str:
    try:
        async with asyncio.timeout(1.0):
            code = await asyncio.shield(process.ended)
    except TimeoutError:
        return "ended its worker process"
    return f"ended its worker process with {f'exit code {code}' if code >= 0 else signal_name(-code)}"


def _clean_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("VIME_") and any(secret in name for secret in SECRETS))
    }


def _bare_environment(environment: dict[str, str], scratch: Path) -> dict[str, str]:
    kept = {name: environment[name] for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH") if name in environment}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    own = {"HOME": str(scratch), "TMPDIR": str(scratch), "MPLCONFIGDIR": str(scratch), "LANG": "C.UTF-8"}
    return {**kept, **threads, **own, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
