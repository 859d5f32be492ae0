"""The authenticated connection between root and worker: both have proved that they know the secret, and every frame is signed.

A frame is four bytes of length, 32 bytes of HMAC-SHA256 over its sequence number, length and body, and the body: one message in msgpack.
A frame that is inserted, dropped, changed or replayed ends the connection. Until both sides are authenticated a frame has at most a few
hundred bytes, is read unbuffered, and must arrive within seconds.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from windlass.core.ranks.frames import LENGTH_BYTES, MAX_FRAME_BYTES, BadFrame, frame, frame_length, read_length
from windlass.runtime.fleet.protocol.handshake import (
    DECODE_ERRORS,
    MAX_HELLO_BYTES,
    PROOF_REFUSED,
    ROOT,
    WORKER,
    Handshake,
    NotAdmitted,
    SigningKeys,
)
from windlass.runtime.fleet.protocol.messages import FromRoot, FromWorker, Heartbeat

TAG_BYTES = 32
READ_BYTES = 2**18
BUFFER_BYTES = 2**20
HANDSHAKE_SECONDS = 5.0
HEARTBEAT_INTERVAL_SECONDS, CHECKS_PER_HEARTBEAT = 1.0, 4
SILENCE_TIMEOUT_SECONDS = 4.0

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)


class ChannelLost(Exception):
    """The other side is gone, silent, or violates the protocol. Not a user error: reconnect."""


class MessageChannel(Protocol[Sent, Received]):
    """Messages in both directions, over TCP (Channel) or through memory (loopback.MemoryChannel)."""

    @property
    def silent_seconds(self) -> float:
        """Since anything was received, while `receive` waits."""
        ...

    def post(self, message: Sent) -> None:
        """Does not wait. Does nothing if the channel is lost: `receive` raises then."""
        ...

    async def send(self, message: Sent) -> None:
        """Waits while the send buffer is full."""
        ...

    async def receive(self) -> Received:
        """The next message. Raises ChannelLost."""
        ...

    def mask_key(self, key: bytes, name: str) -> bytes:
        """A key, masked for a channel that others can read; masking again restores it. `name` must be unique on this channel."""
        ...

    def close(self) -> None:
        """At once; what was posted before may be lost. May be called twice."""
        ...


# --- frames ----------------------------------------------------------------------------------------------------------


class FrameSigner:
    """Signs or verifies the frames of one direction; their sequence number is part of what is signed."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def frame(self, body: bytes) -> bytes:
        length = frame_length(len(body) + TAG_BYTES)
        return b"".join((length, self._tag(length, body), body))

    def check(self, length: bytes, tag: bytes, body: bytes | bytearray) -> None:
        if not hmac.compare_digest(tag, self._tag(length, body)):
            raise ChannelLost(
                f"the signature of frame {self._count} is wrong: it was changed on its way, or sent by someone else"
            )

    def _tag(self, length: bytes, body: bytes | bytearray) -> bytes:
        self._count += 1
        found = hmac.new(self._key, self._count.to_bytes(8, "big") + length, "sha256")
        found.update(body)
        return found.digest()


class Channel(Generic[Sent, Received]):
    """A MessageChannel over TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: SigningKeys, received: Any) -> None:
        """`received`: the union of messages that the other side may send."""
        self._reader, self._writer = reader, writer
        self._sign, self._verify = FrameSigner(keys.mine), FrameSigner(keys.theirs)
        self._mask = hmac.digest(min(keys), max(keys), "sha256")  # the same on both sides, and never sent
        self._decode = msgspec.msgpack.Decoder(received).decode
        self._last_received, self._is_listening = time.monotonic(), False
        self.address = _address(writer, "peername")
        """Of the other side."""
        self.local_address = _address(writer, "sockname")
        """Of this side, as the other sees it."""

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._last_received if self._is_listening else 0.0

    def post(self, message: Sent) -> None:
        if not self._writer.is_closing():
            self._writer.write(self._sign.frame(msgspec.msgpack.encode(message)))

    async def send(self, message: Sent) -> None:
        self.post(message)
        try:
            await self._writer.drain()
        except OSError as error:
            raise ChannelLost(f"the connection is lost: {error}") from error

    async def receive(self) -> Received:
        self._last_received, self._is_listening = time.monotonic(), True
        try:
            return await self._receive()
        except (OSError, EOFError) as error:
            raise ChannelLost(
                f"the connection is lost: {error}" if str(error) else "the other side closed the connection"
            ) from error
        finally:
            self._is_listening = False

    async def _receive(self) -> Received:
        length = await self._read(LENGTH_BYTES)
        try:
            count = read_length(length, MAX_FRAME_BYTES + TAG_BYTES) - TAG_BYTES
        except BadFrame as error:
            raise ChannelLost(str(error)) from error
        if count < 0:
            raise ChannelLost(f"a frame of {count + TAG_BYTES} bytes is too short for a signature")
        tag = await self._read(TAG_BYTES)
        body = await self._read(count)
        self._verify.check(bytes(length), bytes(tag), body)
        try:
            return self._decode(body)
        except DECODE_ERRORS as error:  # correctly signed, but not a message: another version
            raise ChannelLost(f"a message cannot be decoded: {error}") from error

    async def _read(self, count: int) -> bytes | bytearray:
        """In parts, so that a long frame on a slow link does not count as silence, and memory is only used for what arrives."""
        data = bytearray()
        while len(data) < count:
            part = await self._reader.read(min(count - len(data), READ_BYTES))
            if not part:
                raise EOFError
            self._last_received = time.monotonic()
            if len(part) == count:
                return part
            data += part
        return data

    def mask_key(self, key: bytes, name: str) -> bytes:
        mask = hmac.digest(self._mask, f"windlass cover {name}".encode(), "sha256")
        return bytes(one ^ other for one, other in zip(key, mask, strict=True))

    def close(self) -> None:
        """Posted messages get a moment: the transport flushes its buffer before it closes, unless the other side reads nothing."""
        transport = self._writer.transport
        if not transport.is_closing():
            transport.close()
            asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_SECONDS, transport.abort)


def _address(writer: asyncio.StreamWriter, which: str) -> str:
    """IPv4-mapped IPv6 addresses as IPv4."""
    return str(writer.get_extra_info(which, ("",))[0]).removeprefix("::ffff:")


async def keep_alive(channel: MessageChannel[Heartbeat, Any], heartbeat: Callable[[], Heartbeat] = Heartbeat) -> None:
    """Sends a heartbeat every second; raises ChannelLost after four seconds of silence."""
    pause = HEARTBEAT_INTERVAL_SECONDS / CHECKS_PER_HEARTBEAT
    for check in itertools.count():
        if check % CHECKS_PER_HEARTBEAT == 0:
            channel.post(heartbeat())
        began = time.monotonic()
        await asyncio.sleep(pause)
        was_suspended = (
            time.monotonic() - began > 2 * HEARTBEAT_INTERVAL_SECONDS
        )  # then messages have arrived that were not read yet
        if channel.silent_seconds > SILENCE_TIMEOUT_SECONDS and not was_suspended:
            raise ChannelLost(f"no heartbeat for {channel.silent_seconds:.1f} s")


# --- connecting ---------------------------------------------------------------------------------------------------------


async def dial(host: str, port: int, secret: bytes, timeout_seconds: float = HANDSHAKE_SECONDS) -> Channel[FromRoot, FromWorker]:
    """The root's side. Raises ChannelLost if nobody answers, NotAdmitted if it is not a worker with our secret."""
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_seconds):
            connection = await _connect(host, port)
            return await _handshake(connection, Handshake(secret, ROOT), _prove_as_root, FromWorker)
    except TimeoutError:
        raise ChannelLost(f"{where} did not answer within {timeout_seconds:g} s") from None
    except NotAdmitted as error:
        raise NotAdmitted(f"{where}: {error}") from None
    except (OSError, EOFError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else str(error) or "the connection was closed"
        raise ChannelLost(f"{where}: {reason}") from None


async def accept(connection: socket.socket, secret: bytes) -> Channel[FromWorker, FromRoot]:
    """The worker's side of an accepted socket. Raises NotAdmitted, OSError or EOFError; the caller sets the timeout."""
    return await _handshake(connection, Handshake(secret, WORKER), _prove_as_worker, FromRoot)


async def _handshake(connection: socket.socket, handshake: Handshake, prove: Any, received: Any) -> Channel[Any, Any]:
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await prove(connection, handshake)
        reader, writer = await asyncio.open_connection(sock=connection, limit=BUFFER_BYTES)
    except BaseException:
        connection.close()
        raise
    return Channel(reader, writer, handshake.keys(), received)


async def _prove_as_root(connection: socket.socket, handshake: Handshake) -> None:
    await _write(connection, handshake.hello)
    handshake.receive_hello(await _read(connection))
    await _write(connection, handshake.proof())
    handshake.receive_proof(await _read(connection))


async def _prove_as_worker(connection: socket.socket, handshake: Handshake) -> None:
    hello = await _read(connection)
    await _write(connection, handshake.hello)  # before it is checked, so that the root too can report both versions
    handshake.receive_hello(hello)
    try:
        handshake.receive_proof(await _read(connection))
    except NotAdmitted:
        await _write(connection, PROOF_REFUSED)
        raise
    await _write(connection, handshake.proof())


async def _connect(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failed: OSError | None = None
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, address)
            return connection
        except OSError as error:
            connection.close()
            failed = error
        except BaseException:
            connection.close()
            raise
    raise failed or OSError("no address")


async def _write(connection: socket.socket, body: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, frame(body))


async def _read(connection: socket.socket) -> bytes:
    count = int.from_bytes(await _read_exactly(connection, LENGTH_BYTES), "big")
    if not 0 < count <= MAX_HELLO_BYTES:
        raise NotAdmitted("it does not speak Windlass's protocol")
    return await _read_exactly(connection, count)


async def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(connection, count - len(data))
        if not part:
            raise EOFError("the connection was closed during the handshake")
        data += part
    return data
