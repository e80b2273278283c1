"""A request with a body that nobody should read."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

SIZE = 300 << 20


def send_body(url: str, path: str, headers: str = "") -> tuple[int, int]:
    """POST a body of SIZE bytes; the status of the answer, and how many bytes the server took before it broke off."""
    where = urlsplit(url)
    assert where.hostname is not None
    piece, sent = b"x" * (1 << 16), 0
    with socket.create_connection((where.hostname, where.port or 80), timeout=20) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {SIZE}\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(1 << 16)
        try:
            while sent < SIZE:
                sent += connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
    return int(answer.split()[1]), sent
