"""The address of a network interface of this node."""

from __future__ import annotations

import fcntl
import socket
import struct

from vime.errors import UserError

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
