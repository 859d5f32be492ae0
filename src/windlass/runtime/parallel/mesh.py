"""A full mesh of authenticated connections between the ranks of a group. Imports no torch.

The higher rank connects to the lower one. Each sends a nonce and an HMAC of both nonces under the epoch's key, the listener first, so that
an impostor that listens learns nothing it could use elsewhere. Other peers, and slow ones, are disconnected without an answer.
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

from windlass.runtime.parallel.group import GroupLost
from windlass.runtime.parallel.store import RendezvousStore

RENDEZVOUS_SECONDS = 120.0
"""For all ranks to connect: they start Python and import torch first, perhaps all on one machine."""
REACH_SECONDS = 15.0
"""A rank publishes its address only once it listens, and the kernel accepts for it however busy it is: no answer for this long means that
there is no route."""
PROOF_SECONDS = 3.0
"""From being accepted to being authenticated."""
MAX_PENDING = 64
"""Connections that are not authenticated yet; beyond that, the oldest is closed."""
BACKLOG = 128
RANK_BYTES, NONCE_BYTES, PROOF_BYTES = 4, 32, 32
HELLO_BYTES = RANK_BYTES + NONCE_BYTES
WELCOME = b"\x01"
RETRY_SECONDS, POLL_SECONDS = 0.1, 0.2


def connect_all(
    store: RendezvousStore, name: str, rank: int, size: int, key: bytes, host: str, seconds: float = RENDEZVOUS_SECONDS
) -> list[socket.socket | None]:
    """Connections by rank; None for this rank itself. `name`: of the group; the same on all its ranks, and unique.

    `host`: the address to listen on; empty: Unix sockets, for ranks of this machine only.
    """
    until = time.monotonic() + seconds
    connections: list[socket.socket | None] = [None] * size
    try:
        with _listening(host) as (listener, address):
            store.put(f"{name}/{rank}", address.encode())
            for other in range(rank):
                peer_address = store.take(f"{name}/{other}", max(until - time.monotonic(), 0.0)).decode()
                connections[other] = _dial(peer_address, _Proof(key, name, other, rank), until)
            _accept_all(listener, key, name, rank, connections, until)
    except BaseException:
        for connection in connections:
            if connection is not None:
                connection.close()
        raise
    return connections


class _Proof:
    """Authenticates one connection between the ranks `listener` and `dialler` of the group `name`."""

    def __init__(self, key: bytes, name: str, listener: int, dialler: int) -> None:
        self._key, self.listener, self.dialler = key, listener, dialler
        self._name = name.encode()

    def digest(self, role: bytes, dialler_nonce: bytes, listener_nonce: bytes) -> bytes:
        ranks = self.listener.to_bytes(RANK_BYTES, "big") + self.dialler.to_bytes(RANK_BYTES, "big")
        return hmac.digest(
            self._key, b"windlass links " + role + ranks + dialler_nonce + listener_nonce + self._name, hashlib.sha256
        )


@contextmanager
def _listening(host: str) -> Iterator[tuple[socket.socket, str]]:
    """The listener and its address. It is closed once all ranks are connected."""
    with contextlib.ExitStack() as stack:
        if host:
            family, kind, protocol, _, host_address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.bind(host_address)
            port = listener.getsockname()[1]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="windlass-rendezvous-"))  # private: mode 0700
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            address = f"unix:{Path(folder) / 'links'}"
            with _short(address) as path:
                listener.bind(path)
        listener.listen(BACKLOG)
        yield listener, address


@contextmanager
def _short(address: str) -> Iterator[str]:
    """A path to a Unix socket. The system takes 107 bytes (unix(7)); where TMPDIR is longer, the folder is opened and named by its number."""
    path = Path(address.removeprefix("unix:"))
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


# --- connecting


def _dial(address: str, proof: _Proof, until: float) -> socket.socket:
    """Retries while the peer does not answer or closes the connection: it may be flooded by others."""
    problem: Exception = TimeoutError("timed out")
    reached = time.monotonic()
    while (left := min(until, reached + REACH_SECONDS) - time.monotonic()) > 0:
        try:
            connection = _connected(address, min(left, PROOF_SECONDS))
        except OSError as error:
            problem = error
        else:
            reached = time.monotonic()
            try:
                _authenticate(connection, proof)
                return _prepared(connection)
            except (OSError, EOFError) as error:
                problem = error
                connection.close()
            except BaseException:
                connection.close()
                raise
        time.sleep(RETRY_SECONDS)
    raise GroupLost(f"rank {proof.dialler} could not connect to rank {proof.listener} at {address}: {problem}")


def _connected(address: str, seconds: float) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            with _short(address) as path:
                connection.connect(path)
        except BaseException:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), seconds)


def _authenticate(connection: socket.socket, proof: _Proof) -> None:
    ours = os.urandom(NONCE_BYTES)
    connection.sendall(proof.dialler.to_bytes(RANK_BYTES, "big") + ours)
    theirs, digest = _read(connection, NONCE_BYTES), _read(connection, PROOF_BYTES)
    if not hmac.compare_digest(digest, proof.digest(b"listener", ours, theirs)):
        raise GroupLost(f"the peer at rank {proof.listener}'s address does not know this epoch's key")
    connection.sendall(proof.digest(b"dialler", ours, theirs))
    if _read(connection, len(WELCOME)) != WELCOME:
        raise EOFError(f"rank {proof.listener} rejected rank {proof.dialler}")


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


# --- accepting


class _Pending:
    """A connection that is not authenticated yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.until = connection, time.monotonic() + PROOF_SECONDS
        self.data = bytearray()
        self.nonce = b""
        self.proof: _Proof | None = None

    def read(self) -> bool:
        """False: close it."""
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
        """Answers its hello with the listener's nonce and digest."""
        dialler = int.from_bytes(self.data[:RANK_BYTES], "big")
        if not rank < dialler < size:
            return False
        self.proof, self.nonce = _Proof(key, name, rank, dialler), os.urandom(NONCE_BYTES)
        return self.send(self.nonce + self.proof.digest(b"listener", self.theirs, self.nonce))

    @property
    def theirs(self) -> bytes:
        return bytes(self.data[RANK_BYTES:HELLO_BYTES])

    def send(self, data: bytes) -> bool:
        """These few bytes always fit into the send buffer of a genuine rank's connection."""
        try:
            return self.connection.send(data) == len(data)
        except OSError:
            return False

    def is_authentic(self) -> bool:
        assert self.proof is not None
        expected = self.proof.digest(b"dialler", self.theirs, self.nonce)
        return hmac.compare_digest(bytes(self.data[HELLO_BYTES:]), expected) and self.send(WELCOME)


class _Acceptor:
    """Accepts connections from higher ranks, and rejects all others."""

    def __init__(
        self, listener: socket.socket, key: bytes, name: str, rank: int, connections: list[socket.socket | None]
    ) -> None:
        self._listener, self._key, self._name, self._rank, self._connections = listener, key, name, rank, connections
        self._pending: dict[socket.socket, _Pending] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def missing(self) -> list[int]:
        return [other for other in range(self._rank + 1, len(self._connections)) if self._connections[other] is None]

    def poll(self) -> None:
        """Handles what is ready, or waits a little."""
        for ready, _ in self._selector.select(timeout=POLL_SECONDS):
            if ready.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(ready.fileobj, socket.socket)
                self._handle(ready.fileobj)
        now = time.monotonic()
        late = [connection for connection, pending in self._pending.items() if pending.until < now]
        for connection in late or list(self._pending)[: max(len(self._pending) - MAX_PENDING, 0)]:
            self._remove(connection).close()

    def close(self) -> None:
        for connection in list(self._pending):
            self._remove(connection).close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(MAX_PENDING):
            try:
                connection = self._listener.accept()[0]
            except OSError:  # no more, or closed already
                return
            self._pending[connection] = _Pending(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _remove(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._pending[connection]
        return connection

    def _handle(self, connection: socket.socket) -> None:
        pending = self._pending[connection]
        if not pending.read():
            self._remove(connection).close()
        elif pending.proof is None:
            if len(pending.data) == HELLO_BYTES and not pending.challenge(
                self._key, self._name, self._rank, len(self._connections)
            ):
                self._remove(connection).close()
        elif len(pending.data) == HELLO_BYTES + PROOF_BYTES:
            self._remove(connection)
            self._admit(pending)

    def _admit(self, pending: _Pending) -> None:
        if pending.proof is None or not pending.is_authentic():
            pending.connection.close()
            return
        before = self._connections[pending.proof.dialler]
        if before is not None:  # it did not get our welcome in time, and reconnected
            before.close()
        self._connections[pending.proof.dialler] = _prepared(pending.connection)


def _accept_all(
    listener: socket.socket, key: bytes, name: str, rank: int, connections: list[socket.socket | None], until: float
) -> None:
    """Returns when all higher ranks are connected."""
    with contextlib.closing(_Acceptor(listener, key, name, rank, connections)) as acceptor:
        while missing := acceptor.missing():
            if time.monotonic() > until:
                raise GroupLost(f"rank {rank} of {name!r} timed out waiting for rank {', '.join(map(str, missing))} to connect")
            acceptor.poll()
