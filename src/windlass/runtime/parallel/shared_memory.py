"""Memory shared by two ranks of one machine: an unlinked file in /dev/shm that both have open, arranged over their authenticated connection.

The lower rank creates the file, sends its name, and unlinks it once the other has answered. If the other cannot open it (ranks in two
containers), both use the socket alone.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path("/dev/shm")
RING_BYTES = 2**18
"""Per direction. Half of it fits a core's L2 cache; larger tensors pass through in pieces."""
HEADER_BYTES = 4096
FILE_BYTES = 2 * (HEADER_BYTES + RING_BYTES)
NAME_BYTES = 32
HAVE, HAVE_NOT = b"\x01", b"\x00"
NO_NAME = b"\x00" * NAME_BYTES


def share_memory(sockets: Sequence[socket.socket | None], together: Sequence[bool], rank: int) -> list[int | None]:
    """By rank: a file descriptor of the shared memory, or None. `together`: which ranks are expected on this machine."""
    found: list[int | None] = [None] * len(sockets)
    offered = {
        other: _offer(connection)
        for other, connection in enumerate(sockets)
        if connection is not None and together[other] and rank < other
    }
    for other, connection in enumerate(sockets):
        if connection is not None and together[other] and rank > other:
            found[other] = _accepted(connection)
    for other, file in offered.items():
        connection = sockets[other]
        assert connection is not None
        found[other] = _confirmed(connection, file)
    return found


def _offer(connection: socket.socket) -> tuple[Path, int] | None:
    name = f"windlass-{secrets.token_hex(8)}"
    file = FOLDER / name
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        connection.sendall(NO_NAME)
        return None
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)  # fail now, not in the middle of a step: /dev/shm may be small
    except OSError:
        file.unlink()
        os.close(descriptor)
        connection.sendall(NO_NAME)
        return None
    connection.sendall(name.encode().ljust(NAME_BYTES, b"\x00"))
    return file, descriptor


def _confirmed(connection: socket.socket, offered: tuple[Path, int] | None) -> int | None:
    if offered is None:
        return None
    file, descriptor = offered
    try:
        answer = connection.recv(len(HAVE))
    finally:
        file.unlink(missing_ok=True)
    if answer == HAVE:
        return descriptor
    os.close(descriptor)
    return None


def _accepted(connection: socket.socket) -> int | None:
    data = b""
    while len(data) < NAME_BYTES:
        part = connection.recv(NAME_BYTES - len(data))
        if not part:
            return None
        data += part
    if data == NO_NAME:
        return None
    name = data.rstrip(b"\x00").decode(errors="replace")
    try:
        descriptor = os.open(FOLDER / Path(name).name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        connection.sendall(HAVE_NOT)
        return None
    if os.fstat(descriptor).st_size != FILE_BYTES or os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        connection.sendall(HAVE_NOT)
        return None
    connection.sendall(HAVE)
    return descriptor
