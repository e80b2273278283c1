"""Ports that are reserved by binding them before anybody is told their number, addresses, and no proxies."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from vime.errors import UserError


@dataclass(frozen=True)
class ReservedPort:
    """A port held by a bound socket that never listens. A server that sets SO_REUSEADDR can bind and listen on it.

    While the socket is open the kernel gives the number to nobody who asks for a free one, so a restarted server gets
    the same address again.
    """

    host: str
    port: int
    holder: socket.socket

    @property
    def url(self) -> str:
        """Where a server on this port answers."""
        return http_url(self.host, self.port)


def http_url(host: str, port: int) -> str:
    """`http://host:port`, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reserve_port(host: str) -> ReservedPort:
    """Binds a free port of `host`. Raises OSError when `host` is not an address of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    holder = socket.socket(family, socket.SOCK_STREAM)
    # Both flags: SO_REUSEADDR lets vLLM and the router bind beside this socket (neither listens yet), SO_REUSEPORT
    # lets a server that asks for that flag do the same.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(address)
    return ReservedPort(host, holder.getsockname()[1], holder)


def without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a program that asks this run's servers alone: no proxy that the environment names sees it."""
    return {name: value for name, value in environ.items() if not name.lower().endswith("_proxy")}


_SIOCGIFADDR = 0x8915


def interface_address(name: str) -> str:
    """The IPv4 address of interface `name` here. Raises UserError naming the interfaces that there are."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            there = ", ".join(found for _, found in socket.if_nameindex())
            raise UserError(
                f"cluster.interface={name} has no IPv4 address on {socket.gethostname()} ({error.strerror});"
                f" its interfaces are {there}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard one: a login's is commonly 1024, and each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


MAX_TEMPORARY = 70
"""Characters of the folder of temporary files: vLLM adds a name of 37 for a socket, and the kernel takes 107 in all."""


def check_temporary_folder(environment: Mapping[str, str]) -> None:
    """Refuse a folder of temporary files in which no socket can be made. `environment` adds to this process's.

    Raises UserError: vLLM would give up minutes later without naming TMPDIR.
    """
    folder = environment.get("TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(folder)) > MAX_TEMPORARY:
        raise UserError(
            f"TMPDIR={folder} has {len(os.fsencode(folder))} characters on {socket.gethostname()}, and the path of a"
            f" socket in it would be too long: set one of at most {MAX_TEMPORARY}, such as"
            " cluster.environment.TMPDIR=/tmp"
        )
