"""A key on a TCP port: the kernel drops every segment, the first one too, that is not signed with it (RFC 2385).

vllm-router asks nobody who they are, and any user of a node reaches its loopback interface. Its listening sockets are
given a key from outside, and only the proxy's connections carry it. A kernel without TCP_MD5SIG or pidfd_getfd (older
than 5.6), or one that forbids the second, cannot do that: `lock_ports` then says why.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_TCP_MD5SIG_EXT = 32
_ANY_ADDRESS = 1
"""TCP_MD5SIG_FLAG_PREFIX: with a prefix of no bits the key holds for every peer."""
_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)


def new_key() -> bytes:
    """A random key, for one port of one run."""
    return secrets.token_bytes(64)


def set_key(sock: socket.socket, key: bytes) -> None:
    """Sign and check all of an IPv4 socket's segments with `key`. Raises OSError where the kernel cannot."""
    peer = struct.pack("=H126x", socket.AF_INET)
    sock.setsockopt(
        socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, peer + struct.pack("=BBHI80s", _ANY_ADDRESS, 0, len(key), 0, key)
    )


def lock_ports(pid: int, key: bytes) -> set[int]:
    """Set `key` on every TCP port on which process `pid`, a child of this one, listens; returns their numbers.

    Raises OSError where the kernel cannot, or does not let this process.
    """
    locked = set()
    for listener in _listeners(pid):
        with listener:
            set_key(listener, key)
            locked.add(listener.getsockname()[1])
    return locked


def _listeners(pid: int) -> Iterator[socket.socket]:
    """Copies of the descriptors, so options set on them hold for the process too."""
    process = os.pidfd_open(pid)
    try:
        for entry in sorted(Path(f"/proc/{pid}/fd").iterdir()):
            try:
                if not str(entry.readlink()).startswith("socket:"):
                    continue
            except FileNotFoundError:
                continue  # closed meanwhile
            descriptor = _LIBC.syscall(_PIDFD_GETFD, process, int(entry.name), 0)
            if descriptor < 0:
                raise OSError(ctypes.get_errno(), f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
            copy = socket.socket(fileno=descriptor)
            if copy.family == socket.AF_INET and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield copy
            else:
                copy.close()
    finally:
        os.close(process)
