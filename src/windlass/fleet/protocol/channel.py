"""A connection on which root and worker speak: both have proved that they know the secret, and every frame is signed and counted.

A frame is four bytes of length, thirty-two of HMAC-SHA256 over its number, its length and its body, and the body: one message, msgpack. Nothing can
be put in, left out, changed or said again without the connection ending. Before both have proved themselves a frame has at most a few hundred
bytes, is read without a buffer, and must come within seconds.
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

from windlass.core.frames import LENGTH_BYTES, MAX_FRAME_BYTES, BadFrame, frame, frame_length, read_length
from windlass.fleet.protocol.handshake import (
    DECODE_ERRORS,
    MAX_HELLO_BYTES,
    PROOF_REFUSED,
    ROOT,
    WORKER,
    Handshake,
    NotAdmitted,
    SigningKeys,
)
from windlass.fleet.protocol.messages import FromRoot, FromWorker, Heartbeat

TAG_BYTES = 32
READ_BYTES = 2**18
BUFFER_BYTES = 2**20
HANDSHAKE_SECONDS = 5.0
HEARTBEAT_INTERVAL_SECONDS, CHECKS_PER_HEARTBEAT = 1.0, 4
SILENCE_TIMEOUT_SECONDS = 4.0

Said = TypeVar("Said", contravariant=True)
Heard = TypeVar("Heard", covariant=True)


class ChannelLost(Exception):
    """The other side is gone, silent, or says what it should not. Not the user's to mend: whoever needs it connects anew."""


class MessageChannel(Protocol[Said, Heard]):
    """What a channel is to those who speak on it; through memory where both sides are one process."""

    @property
    def silent_seconds(self) -> float:
        """Since anything was heard, while somebody listens."""
        ...

    def post(self, message: Said) -> None:
        """Without waiting. To one that is lost nothing is said; `receive` tells."""
        ...

    async def send(self, message: Said) -> None:
        """Waits while much is on its way already."""
        ...

    async def receive(self) -> Heard:
        """The next message. Raises ChannelLost."""
        ...

    def mask_key(self, key: bytes, name: str) -> bytes:
        """A key as it may travel, where others can listen; and, on the other side, what it was. `name`: of nothing else on this wire."""
        ...

    def close(self) -> None:
        """At once; what was posted before may be lost. May be called twice."""
        ...


# --- frames ----------------------------------------------------------------------------------------------------------


class FrameSigner:
    """Signs the frames of one direction, or checks them: their number is part of what is signed."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def frame(self, body: bytes) -> bytes:
        length = frame_length(len(body) + TAG_BYTES)
        return b"".join((length, self._tag(length, body), body))

    def check(self, length: bytes, tag: bytes, body: bytes | bytearray) -> None:
        if not hmac.compare_digest(tag, self._tag(length, body)):
            raise ChannelLost(f"frame {self._count} is not signed as it should be: it was changed, or is not the other side's")

    def _tag(self, length: bytes, body: bytes | bytearray) -> bytes:
        self._count += 1
        found = hmac.new(self._key, self._count.to_bytes(8, "big") + length, "sha256")
        found.update(body)
        return found.digest()


class Channel(Generic[Said, Heard]):
    """A Wire over TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: SigningKeys, heard: Any) -> None:
        """`heard`: the union of messages that the other side may send."""
        self._reader, self._writer = reader, writer
        self._mine, self._theirs = FrameSigner(keys.mine), FrameSigner(keys.theirs)
        self._mask = hmac.digest(min(keys), max(keys), "sha256")  # the same on both sides, and no part of it was ever said
        self._decode = msgspec.msgpack.Decoder(heard).decode
        self._last_heard, self._is_listening = time.monotonic(), False
        self.address = _address(writer, "peername")
        """Of the other side."""
        self.own_address = _address(writer, "sockname")
        """That the other side sees."""

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._last_heard if self._is_listening else 0.0

    def post(self, message: Said) -> None:
        if not self._writer.is_closing():
            self._writer.write(self._mine.frame(msgspec.msgpack.encode(message)))

    async def send(self, message: Said) -> None:
        self.post(message)
        try:
            await self._writer.drain()
        except OSError as error:
            raise ChannelLost(f"the connection is lost: {error}") from error

    async def receive(self) -> Heard:
        self._last_heard, self._is_listening = time.monotonic(), True
        try:
            return await self._receive()
        except (OSError, EOFError) as error:
            raise ChannelLost(
                f"the connection is lost: {error}" if str(error) else "the other side closed the connection"
            ) from error
        finally:
            self._is_listening = False

    async def _receive(self) -> Heard:
        length = await self._read(LENGTH_BYTES)
        try:
            count = read_length(length, MAX_FRAME_BYTES + TAG_BYTES) - TAG_BYTES
        except BadFrame as error:
            raise ChannelLost(str(error)) from error
        if count < 0:
            raise ChannelLost(f"a frame of {count + TAG_BYTES} bytes, too short to be signed")
        tag = await self._read(TAG_BYTES)
        body = await self._read(count)
        self._theirs.check(bytes(length), bytes(tag), body)
        try:
            return self._decode(body)
        except DECODE_ERRORS as error:  # signed by one who knows the secret, and yet no message: another program
            raise ChannelLost(f"a message that is none: {error}") from error

    async def _read(self, count: int) -> bytes | bytearray:
        """Piece by piece, so that a long frame on a slow line is no silence, and no memory is taken for what does not come."""
        data = bytearray()
        while len(data) < count:
            part = await self._reader.read(min(count - len(data), READ_BYTES))
            if not part:
                raise EOFError
            self._last_heard = time.monotonic()
            if len(part) == count:
                return part
            data += part
        return data

    def mask_key(self, key: bytes, name: str) -> bytes:
        mask = hmac.digest(self._mask, f"windlass cover {name}".encode(), "sha256")
        return bytes(one ^ other for one, other in zip(key, mask, strict=True))

    def close(self) -> None:
        """What was posted gets a moment: a transport writes what it has before it closes, unless the other side takes nothing."""
        transport = self._writer.transport
        if not transport.is_closing():
            transport.close()
            asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_SECONDS, transport.abort)


def _address(writer: asyncio.StreamWriter, which: str) -> str:
    """IPv4 as IPv4, where a socket of IPv6 took it in."""
    return str(writer.get_extra_info(which, ("",))[0]).removeprefix("::ffff:")


async def keep_alive(channel: MessageChannel[Heartbeat, Any], heartbeat: Callable[[], Heartbeat] = Heartbeat) -> None:
    """Says every second that there is life here; raises ChannelLost when there has been none there for four."""
    pause = HEARTBEAT_INTERVAL_SECONDS / CHECKS_PER_HEARTBEAT
    for look in itertools.count():
        if look % CHECKS_PER_HEARTBEAT == 0:
            channel.post(heartbeat())
        began = time.monotonic()
        await asyncio.sleep(pause)
        was_asleep = (
            time.monotonic() - began > 2 * HEARTBEAT_INTERVAL_SECONDS
        )  # this process itself: what came has not been read yet
        if channel.silent_seconds > SILENCE_TIMEOUT_SECONDS and not was_asleep:
            raise ChannelLost(f"nothing was heard for {channel.silent_seconds:.1f} s")


# --- meeting ---------------------------------------------------------------------------------------------------------


async def dial(host: str, port: int, secret: bytes, timeout_seconds: float = HANDSHAKE_SECONDS) -> Channel[FromRoot, FromWorker]:
    """The root's side. Raises ChannelLost where nobody answers, NotAdmitted where somebody else does."""
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_seconds):
            connection = await _connected(host, port)
            return await _met(connection, Handshake(secret, ROOT), _prove_first, FromWorker)
    except TimeoutError:
        raise ChannelLost(f"{where} did not answer within {timeout_seconds:g} s") from None
    except NotAdmitted as error:
        raise NotAdmitted(f"{where}: {error}") from None
    except (OSError, EOFError) as error:
        number = getattr(error, "errno", None)
        words = os.strerror(number) if number and number > 0 else str(error) or "the connection was closed"
        raise ChannelLost(f"{where}: {words}") from None


async def accept(connection: socket.socket, secret: bytes) -> Channel[FromWorker, FromRoot]:
    """The worker's side, of a socket that somebody has connected to. Raises NotAdmitted, OSError or EOFError; the time limit is the caller's."""
    return await _met(connection, Handshake(secret, WORKER), _prove_second, FromRoot)


async def _met(connection: socket.socket, handshake: Handshake, how: Any, heard: Any) -> Channel[Any, Any]:
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await how(connection, handshake)
        reader, writer = await asyncio.open_connection(sock=connection, limit=BUFFER_BYTES)
    except BaseException:
        connection.close()
        raise
    return Channel(reader, writer, handshake.keys(), heard)


async def _prove_first(connection: socket.socket, handshake: Handshake) -> None:
    await _write(connection, handshake.hello)
    handshake.hear_hello(await _read(connection))
    await _write(connection, handshake.proof())
    handshake.hear_proof(await _read(connection))


async def _prove_second(connection: socket.socket, handshake: Handshake) -> None:
    heard = await _read(connection)
    await _write(connection, handshake.hello)  # before it is judged: the other side too should know both versions
    handshake.hear_hello(heard)
    try:
        handshake.hear_proof(await _read(connection))
    except NotAdmitted:
        await _write(connection, PROOF_REFUSED)
        raise
    await _write(connection, handshake.proof())


async def _connected(host: str, port: int) -> socket.socket:
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
    count = int.from_bytes(await _exactly(connection, LENGTH_BYTES), "big")
    if not 0 < count <= MAX_HELLO_BYTES:
        raise NotAdmitted("it does not speak as Windlass does")
    return await _exactly(connection, count)


async def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(connection, count - len(data))
        if not part:
            raise EOFError("the connection was closed before both had proved themselves")
        data += part
    return data
