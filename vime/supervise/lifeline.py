"""The lifeline: a connection from each rank's wrapper to the supervisor that carries nothing and means "go on".

A step of srun spans nodes, where the supervisor can neither signal a process group nor be anyone's parent. So each
wrapper (`step_rank`) holds this connection, and ends its role when it closes. The supervisor closes it to
stop a run; the kernel closes it when the supervisor is killed; keep-alive notices a node that is gone.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from vime.errors import WaitTimeout
from vime.run.network import allow_many_connections

VARIABLE = "VIME_LIFELINE"
"""host:port of the supervisor's end."""
BACKLOG = 4096
"""Connections that may wait to be accepted. The kernel cuts it to net.core.somaxconn, which may be 128."""
CONNECT_TIMEOUT = 60.0
_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 3


class Lifeline:
    """The supervisor's end. A thread accepts for as long as the run goes on: a rank may start at any time."""

    def __init__(self, host: str) -> None:
        allow_many_connections()
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._held: list[socket.socket] = []
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, name="lifeline", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                self._held.append(connection)

    def close(self) -> None:
        """Tell every wrapper to end its role."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._accepting.join(CONNECT_TIMEOUT)
        self._listener.close()
        for connection in self._held:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._held.clear()


def hold(address: str) -> socket.socket:
    """A wrapper's end: readable once the role must stop. Raises WaitTimeout when the supervisor cannot be reached."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT)
    except OSError as error:
        raise WaitTimeout(f"waited up to {CONNECT_TIMEOUT:g} s for the supervisor at {address}: {error}") from error
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _INTERVAL_S), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection
