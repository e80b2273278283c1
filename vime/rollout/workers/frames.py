"""Frames on a pipe between processes: four bytes of length, then so many bytes.

Requests of the generator are pickles, which its own workers may read. Replies are JSON, because the generator must not
unpickle what a worker that ran hostile text has written.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import StreamReader  # slow to import, and a worker has no event loop

HEAD = struct.Struct(">I")
MAX_REPLY = 64 << 20
"""Bytes of one reply. A longer one is not read."""


def frame(content: bytes) -> bytes:
    """`content` as it goes over the pipe."""
    return HEAD.pack(len(content)) + content


def write_frame(descriptor: int, content: bytes) -> None:
    """Writes a whole frame. Raises OSError when the other side is gone."""
    left = memoryview(frame(content))
    while left:
        left = left[os.write(descriptor, left) :]


def read_frame(descriptor: int) -> bytes | None:
    """The next frame's content; None when the other side is gone."""
    head = _read(descriptor, HEAD.size)
    return None if head is None else _read(descriptor, HEAD.unpack(head)[0])


async def next_frame(reader: StreamReader) -> bytes:
    """The next frame's content. Raises EOFError when the other side is gone, ValueError for more than MAX_REPLY."""
    (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    if size > MAX_REPLY:
        raise ValueError(f"a reply of {size} bytes, and at most {MAX_REPLY} are read")
    return await reader.readexactly(size)


def _read(descriptor: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
