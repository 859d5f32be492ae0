"""Those who have no business at a port, in every way that came to mind; and which ports there are."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
from small_root import SECRET

from windlass.runtime.fleet.protocol.channel import FrameSigner
from windlass.runtime.fleet.protocol.handshake import ROOT, Handshake, NotAdmitted
from windlass.runtime.fleet.protocol.messages import Heartbeat, Join

CONNECT_SECONDS = 0.05
"""A queue that is full already does not answer."""
HOLD_SECONDS = 0.05
AT_ONCE = 40
LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""

Attack = Callable[[socket.socket], None]


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def answer(connection: socket.socket) -> bytes:
    length = connection.recv(4)
    return connection.recv(int.from_bytes(length, "big")) if len(length) == 4 else b""


# --- at the worker's own port


def random_bytes(connection: socket.socket) -> None:
    connection.sendall(random.randbytes(random.choice([1, 3, 40, 5000])))


def huge_length(connection: socket.socket) -> None:
    connection.sendall(random.choice([2**32 - 1, 2**31, 2**26, 513]).to_bytes(4, "big") + bytes(2000))
    time.sleep(HOLD_SECONDS)


def nothing_held_open(connection: socket.socket) -> None:
    time.sleep(HOLD_SECONDS)


def half_a_handshake(connection: socket.socket) -> None:
    connection.sendall(framed(Handshake(SECRET, ROOT).hello))
    answer(connection)
    time.sleep(HOLD_SECONDS)


def drops(connection: socket.socket) -> None:
    for byte in framed(Handshake(SECRET, ROOT).hello)[:10]:
        connection.sendall(bytes([byte]))
        time.sleep(HOLD_SECONDS / 10)


def cut(connection: socket.socket) -> None:
    hello = framed(Handshake(SECRET, ROOT).hello)
    connection.sendall(hello[: random.randrange(len(hello))])


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def deep(connection: socket.socket) -> None:
    connection.sendall(framed(b"\x91" * 500))


def web(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n")


def wrong_secret(connection: socket.socket) -> None:
    handshake = Handshake(b"sixteen other bytes!", ROOT)
    connection.sendall(framed(handshake.hello))
    handshake.receive_hello(answer(connection))
    connection.sendall(framed(handshake.proof()))
    try:
        handshake.receive_proof(answer(connection))
    except NotAdmitted:
        return
    raise AssertionError("let in without the secret")


_BEFORE = Handshake(SECRET, ROOT)
_BEFORE.receive_hello(Handshake(SECRET, "worker").hello)
REPLAYED = framed(_BEFORE.hello) + framed(_BEFORE.proof())


def replayed(connection: socket.socket) -> None:
    """All that a root once said, word for word."""
    connection.sendall(REPLAYED)
    answer(connection)
    assert b"proof" not in answer(connection), "let in by what somebody else had said"


def _proved(connection: socket.socket) -> FrameSigner:
    handshake = Handshake(SECRET, ROOT)
    connection.sendall(framed(handshake.hello))
    handshake.receive_hello(answer(connection))
    connection.sendall(framed(handshake.proof()))
    handshake.receive_proof(answer(connection))
    return FrameSigner(handshake.keys().mine)


def garbage_after_the_handshake(connection: socket.socket) -> None:
    _proved(connection)
    connection.sendall(framed(random.randbytes(200)))
    connection.recv(1)


def a_frame_cut_after_the_handshake(connection: socket.socket) -> None:
    frame = _proved(connection).frame(msgspec.msgpack.encode(Join(b"x", "x")))
    connection.sendall(frame[: random.randrange(len(frame))])


def another_first_word(connection: socket.socket) -> None:
    connection.sendall(_proved(connection).frame(msgspec.msgpack.encode(Heartbeat())))
    connection.recv(1)


def another_root(connection: socket.socket) -> None:
    """With the secret, but while there is one already."""
    connection.sendall(_proved(connection).frame(msgspec.msgpack.encode(Join(b"another", "another"))))
    assert b"busy with root" in connection.recv(1000)


AT_THE_DOOR: tuple[Attack, ...] = (
    random_bytes,
    huge_length,
    nothing_held_open,
    half_a_handshake,
    drops,
    cut,
    reset,
    deep,
    web,
    wrong_secret,
    replayed,
    garbage_after_the_handshake,
    a_frame_cut_after_the_handshake,
    another_first_word,
)


# --- where ranks meet


def rank_without_the_key(connection: socket.socket) -> None:
    connection.settimeout(HOLD_SECONDS)  # most get no answer: a rank that waits for another takes nobody in
    connection.sendall(random.choice([1, 2, 3, 2**31]).to_bytes(4, "big") + os.urandom(32))
    connection.recv(64)
    connection.sendall(os.urandom(32))
    connection.recv(1)


AT_A_MEETING: tuple[Attack, ...] = (random_bytes, huge_length, nothing_held_open, cut, reset, web, rank_without_the_key)


# --- all of them


def attack(port: int, attacks: Iterable[Attack], connect_seconds: float = CONNECT_SECONDS, at_once: int = AT_ONCE) -> int:
    """Many at once; says how many got as far as a connection. What a stranger's own end thinks of it is no matter."""

    def one(how: Attack) -> int:
        try:
            with socket.create_connection(("127.0.0.1", port), connect_seconds) as connection:
                connection.settimeout(2.0)
                with suppress(OSError, NotAdmitted):  # sent away, as it should be
                    how(connection)
                return 1
        except OSError:
            return 0

    with ThreadPoolExecutor(at_once) as strangers:
        return sum(strangers.map(one, attacks))


def chosen(kinds: tuple[Attack, ...], count: int) -> list[Attack]:
    """Every kind alike, in any order."""
    found = [kinds[number % len(kinds)] for number in range(count)]
    random.Random(0).shuffle(found)
    return found


def listening_ports(pid: int) -> set[int]:
    """TCP, of one process."""
    own: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))  # noqa: PTH115 - `socket:[123]` is no path
        except OSError:
            continue
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    """Of its own: not of files that it shares."""
    found = Path(f"/proc/{pid}/status").read_text()
    return int(found.split("RssAnon:")[1].split()[0]) * 1024
