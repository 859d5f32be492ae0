"""A connection between every two ranks of a group, on which both have proved that they know the epoch's key. No torch.

The higher rank dials the lower one. Each sends a nonce, and a hash of both nonces under the key: whoever listens first, so that a dialler
tells nothing to a stranger that it could use elsewhere. What comes in and is not that, or not soon, is dropped without an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.parallel.group import GroupLost

if TYPE_CHECKING:
    from windlass.parallel.rendezvous import Board

MEETING_SECONDS = 120.0
"""For all ranks to come: they start Python and import torch first, perhaps all on one machine."""
REACH_SECONDS = 15.0
"""Whoever says where it listens does: the system answers for it, however busy it is. Where nobody answers for so long there is no way."""
PROOF_SECONDS = 3.0
"""From being let in to having proved who one is."""
MAX_STRANGERS = 64
"""Connections that have proved nothing yet; when one more comes, the oldest goes."""
BACKLOG = 128
RANK_BYTES, NONCE_BYTES, PROOF_BYTES = 4, 32, 32
HELLO_BYTES = RANK_BYTES + NONCE_BYTES
WELCOME = b"\x01"
RETRY_SECONDS, LOOK_SECONDS = 0.1, 0.2


def connect_all(
    board: Board, name: str, rank: int, size: int, key: bytes, host: str, seconds: float = MEETING_SECONDS
) -> list[socket.socket | None]:
    """By rank, None at one's own place. `name`: the same on all ranks of a group and no other's.

    `host`: the address to listen on, and no other; empty: ranks of this machine only, by Unix sockets.
    """
    until = time.monotonic() + seconds
    met: list[socket.socket | None] = [None] * size
    try:
        with _listening(host) as (listener, address):
            board.put(f"{name}/{rank}", address.encode())
            for other in range(rank):
                where = board.take(f"{name}/{other}", max(until - time.monotonic(), 0.0)).decode()
                met[other] = _dialled(where, _Proof(key, name, other, rank), until)
            _accept(listener, key, name, rank, met, until)
    except BaseException:
        for connection in met:
            if connection is not None:
                connection.close()
        raise
    return met


class _Proof:
    """Of one connection, between `listener` and `dialler` of the group `name`."""

    def __init__(self, key: bytes, name: str, listener: int, dialler: int) -> None:
        self._key, self.listener, self.dialler = key, listener, dialler
        self._name = name.encode()

    def of(self, role: bytes, dialler_nonce: bytes, listener_nonce: bytes) -> bytes:
        who = self.listener.to_bytes(RANK_BYTES, "big") + self.dialler.to_bytes(RANK_BYTES, "big")
        return hmac.digest(
            self._key, b"windlass links " + role + who + dialler_nonce + listener_nonce + self._name, hashlib.sha256
        )


@contextmanager
def _listening(host: str) -> Iterator[tuple[socket.socket, str]]:
    """The listener and where it is. It ends with the meeting."""
    with contextlib.ExitStack() as stack:
        if host:
            family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.bind(address)
            port = listener.getsockname()[1]
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="windlass-meet-"))  # ours alone: mode 0700
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            where = f"unix:{Path(folder) / 'links'}"
            listener.bind(where.removeprefix("unix:"))
        listener.listen(BACKLOG)
        yield listener, where


# --- dialling


def _dialled(where: str, proof: _Proof, until: float) -> socket.socket:
    """Tried again while nobody answers, or somebody hangs up: whoever listens may be flooded."""
    problem: Exception = TimeoutError("no time was left")
    reached = time.monotonic()
    while (left := min(until, reached + REACH_SECONDS) - time.monotonic()) > 0:
        try:
            connection = _connected(where, min(left, PROOF_SECONDS))
        except OSError as error:
            problem = error
        else:
            reached = time.monotonic()
            try:
                _introduce(connection, proof)
                return _prepared(connection)
            except (OSError, EOFError) as error:
                problem = error
                connection.close()
            except BaseException:
                connection.close()
                raise
        time.sleep(RETRY_SECONDS)
    raise GroupLost(f"rank {proof.dialler} could not reach rank {proof.listener} at {where}: {problem}")


def _connected(where: str, seconds: float) -> socket.socket:
    if where.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(where.removeprefix("unix:"))
        except BaseException:
            connection.close()
            raise
        return connection
    host, _, port = where.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), seconds)


def _introduce(connection: socket.socket, proof: _Proof) -> None:
    ours = os.urandom(NONCE_BYTES)
    connection.sendall(proof.dialler.to_bytes(RANK_BYTES, "big") + ours)
    theirs, shown = _read(connection, NONCE_BYTES), _read(connection, PROOF_BYTES)
    if not hmac.compare_digest(shown, proof.of(b"listener", ours, theirs)):
        raise GroupLost(f"who answers for rank {proof.listener} does not know this epoch's key")
    connection.sendall(proof.of(b"dialler", ours, theirs))
    if _read(connection, len(WELCOME)) != WELCOME:
        raise EOFError(f"rank {proof.listener} did not let rank {proof.dialler} in")


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data


def _prepared(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


# --- being dialled


class _Stranger:
    """A connection until it has proved what it is."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.until = connection, time.monotonic() + PROOF_SECONDS
        self.data = bytearray()
        self.nonce = b""
        self.proof: _Proof | None = None

    def read(self) -> bool:
        """False: it is to be dropped."""
        wanted = HELLO_BYTES if self.proof is None else HELLO_BYTES + PROOF_BYTES
        try:
            part = self.connection.recv(wanted - len(self.data))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.data += part
        return bool(part)

    def challenge(self, key: bytes, name: str, rank: int, size: int) -> bool:
        """After its hello: the listener's nonce and proof."""
        dialler = int.from_bytes(self.data[:RANK_BYTES], "big")
        if not rank < dialler < size:
            return False
        self.proof, self.nonce = _Proof(key, name, rank, dialler), os.urandom(NONCE_BYTES)
        return self.send(self.nonce + self.proof.of(b"listener", self.theirs, self.nonce))

    @property
    def theirs(self) -> bytes:
        return bytes(self.data[RANK_BYTES:HELLO_BYTES])

    def send(self, data: bytes) -> bool:
        """So little fits into the buffer of a connection that has sent so little; if not, it is no rank's."""
        try:
            return self.connection.send(data) == len(data)
        except OSError:
            return False

    def is_proved(self) -> bool:
        assert self.proof is not None
        wanted = self.proof.of(b"dialler", self.theirs, self.nonce)
        return hmac.compare_digest(bytes(self.data[HELLO_BYTES:]), wanted) and self.send(WELCOME)


class _Door:
    """Where higher ranks come in, among strangers."""

    def __init__(self, listener: socket.socket, key: bytes, name: str, rank: int, met: list[socket.socket | None]) -> None:
        self._listener, self._key, self._name, self._rank, self._met = listener, key, name, rank, met
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._waiting = selectors.DefaultSelector()
        listener.setblocking(False)
        self._waiting.register(listener, selectors.EVENT_READ)

    def missing(self) -> list[int]:
        return [other for other in range(self._rank + 1, len(self._met)) if self._met[other] is None]

    def once(self) -> None:
        """Looks after whoever is there, or waits a little."""
        for ready, _ in self._waiting.select(timeout=LOOK_SECONDS):
            if ready.fileobj is self._listener:
                self._let_in()
            else:
                assert isinstance(ready.fileobj, socket.socket)
                self._hear(ready.fileobj)
        now = time.monotonic()
        late = [connection for connection, stranger in self._strangers.items() if stranger.until < now]
        for connection in late or list(self._strangers)[: max(len(self._strangers) - MAX_STRANGERS, 0)]:
            self._forget(connection).close()

    def close(self) -> None:
        for connection in list(self._strangers):
            self._forget(connection).close()
        self._waiting.close()

    def _let_in(self) -> None:
        for _ in range(MAX_STRANGERS):
            try:
                connection = self._listener.accept()[0]
            except OSError:  # nobody more, or gone again
                return
            self._strangers[connection] = _Stranger(connection)
            self._waiting.register(connection, selectors.EVENT_READ)

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._waiting.unregister(connection)
        del self._strangers[connection]
        return connection

    def _hear(self, connection: socket.socket) -> None:
        stranger = self._strangers[connection]
        if not stranger.read():
            self._forget(connection).close()
        elif stranger.proof is None:
            if len(stranger.data) == HELLO_BYTES and not stranger.challenge(self._key, self._name, self._rank, len(self._met)):
                self._forget(connection).close()
        elif len(stranger.data) == HELLO_BYTES + PROOF_BYTES:
            self._forget(connection)
            self._admit(stranger)

    def _admit(self, stranger: _Stranger) -> None:
        if stranger.proof is None or not stranger.is_proved():
            stranger.connection.close()
            return
        before = self._met[stranger.proof.dialler]
        if before is not None:  # it did not hear our welcome in time, and dialled again
            before.close()
        self._met[stranger.proof.dialler] = _prepared(stranger.connection)


def _accept(listener: socket.socket, key: bytes, name: str, rank: int, met: list[socket.socket | None], until: float) -> None:
    """Returns when all higher ranks are there."""
    with contextlib.closing(_Door(listener, key, name, rank, met)) as door:
        while missing := door.missing():
            if time.monotonic() > until:
                raise GroupLost(f"rank {rank} of {name!r} waited in vain for {', '.join(map(str, missing))}")
            door.once()
