"""The nodes of one engine, whose processes are started together and ended together.

Each node has a process of the engine role. Node 0 runs the server that the run talks to and leads: for every start of
the engine (an incarnation) it hosts the store in which vLLM's ranks meet, bound to this node's interface before its
port is told to anyone. Whichever node sees its own vLLM end first says so; then all end theirs, and once all have, the
next incarnation begins. An engine that fits on a node has only node 0, and none of this costs it anything.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, Field, ValidationError

from vime.buffer.control import Control
from vime.config.section import Strict
from vime.errors import BadMessage, WaitTimeout

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.2
LEADER_PATIENCE = 3.0
"""Seconds in which node 0, whose vLLM has ended, lets another node say so first. A server breaks off as soon as a rank
on another node is lost, often before that node's executor has ended; the other way round no executor ends by itself."""
_T = TypeVar("_T")
_V = TypeVar("_V", bound=BaseModel)


class Rendezvous(Strict):
    """Where the ranks of one incarnation meet."""

    host: str
    port: int = Field(ge=1, le=65535)


class NodeEnd(Strict):
    """The first node of an incarnation whose vLLM ended without being asked to."""

    node: int = Field(ge=0)
    exit_code: int = Field(ge=1)
    """As a shell would say it, never 0."""


class EngineNodes:
    """What one node knows of the others, through the run's store."""

    def __init__(self, control: Control, engine: int, node: int, count: int, host: str) -> None:
        """host: the address of this node's node."""
        self.node, self.count = node, count
        self._control, self._engine, self._host = control, engine, host
        self._store: TCPStore | None = None

    def rendezvous(self, incarnation: int, timeout: float, stopping: Callable[[], bool]) -> Rendezvous | None:
        """Where the ranks of `incarnation` meet; None for an engine of one node, and when `stopping()` became true.

        Node 0 first waits until nothing of the incarnation before is left on the other nodes, the others wait for
        node 0. Raises WaitTimeout after `timeout` seconds.
        """
        if self.count == 1:
            return None
        key = self._key(incarnation, "meeting")
        if self.node > 0:
            what = f"node 0 of engine {self._engine} to begin incarnation {incarnation}"
            return self._wait(partial(self._read, key, Rendezvous), timeout, what, stopping)
        for node in range(1, self.count if incarnation > 0 else 1):
            stopped = partial(self._control.try_get, self._key(incarnation - 1, f"down/{node}"))
            what = f"node {node} of engine {self._engine} to end incarnation {incarnation - 1}"
            if self._wait(stopped, timeout, what, stopping) is None:
                return None
        rendezvous = self._host_store()
        self._control.put(key, rendezvous.model_dump())
        return rendezvous

    def report_end(self, incarnation: int, exit_code: int) -> None:
        """Say that this node's vLLM ended, unless another node was first."""
        deadline = time.monotonic() + LEADER_PATIENCE
        while self.node == 0 and self.count > 1 and time.monotonic() < deadline and self.end(incarnation) is None:
            time.sleep(POLL_SECONDS)
        self._control.claim(self._key(incarnation, "end"), NodeEnd(node=self.node, exit_code=exit_code).model_dump())

    def end(self, incarnation: int) -> NodeEnd | None:
        """The node that ended `incarnation`; None while all nodes run."""
        return self._read(self._key(incarnation, "end"), NodeEnd)

    def ended_elsewhere(self, incarnation: int) -> bool:
        """Whether another node's vLLM has ended."""
        return self.count > 1 and self.end(incarnation) is not None

    def confirm_stopped(self, incarnation: int) -> None:
        """Say that nothing of `incarnation` is left on this node."""
        if self.node > 0:
            self._control.put(self._key(incarnation, f"down/{self.node}"), True)

    def _host_store(self) -> Rendezvous:
        """A store of its own for each incarnation: torch's rendezvous keys hold for one group only."""
        from torch.distributed import TCPStore

        listener = socket.create_server((self._host, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=60),
        )
        return Rendezvous(host=self._host, port=port)

    def _key(self, incarnation: int, name: str) -> str:
        return f"engine-parts/{self._engine}/{incarnation}/{name}"

    def _read(self, key: str, shape: type[_V]) -> _V | None:
        value = self._control.try_get(key)
        try:
            return None if value is None else shape.model_validate(value)
        except ValidationError as error:
            raise BadMessage(f"the store's {key} has the wrong shape: {error.errors()[0]['msg']}") from error

    def _wait(
        self, look: Callable[[], _T | None], timeout: float, what: str, stopping: Callable[[], bool]
    ) -> _T | None:
        # Not a wait in the store: that would hold back this process's signal handlers.
        deadline = time.monotonic() + timeout
        while not stopping():
            found = look()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise WaitTimeout(f"waited {timeout:g} s for {what}")
            time.sleep(POLL_SECONDS)
        return None
