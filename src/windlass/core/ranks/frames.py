"""Length-prefixed frames: four bytes of length (big endian), then the body. The one codec of every socket of ours.

Knows no messages. Signed frames between machines (runtime/fleet/protocol/channel.py) use the same prefix and add a tag.
"""

from __future__ import annotations

import socket

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 2**26


class BadFrame(ValueError):
    """A length that no frame of ours has: the other side speaks another protocol."""


def frame(body: bytes) -> bytes:
    return frame_length(len(body)) + body


def frame_length(count: int) -> bytes:
    return count.to_bytes(LENGTH_BYTES, "big")


def read_length(prefix: bytes | bytearray, max_bytes: int = MAX_FRAME_BYTES) -> int:
    count = int.from_bytes(prefix, "big")
    if count > max_bytes:
        raise BadFrame(f"a frame of {count:,} bytes; the longest allowed is {max_bytes:,}")
    return count


class FrameReader:
    """Bytes as they arrive to whole frame bodies."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            end = body + read_length(self._buffer[start:body], self._max_bytes)
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[body:end]))
            start = end
        del self._buffer[:start]
        return bodies


def write_frame(connection: socket.socket, body: bytes) -> None:
    connection.sendall(frame(body))


def read_frame(connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
    """Blocks for one frame; None: the other end is closed."""
    prefix = _read(connection, LENGTH_BYTES)
    return None if prefix is None else _read(connection, read_length(prefix, max_bytes))


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except ConnectionResetError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
