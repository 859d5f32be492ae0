"""What root and worker say to each other arrives as it was said, or the connection ends; who does not know the secret says nothing."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import owned_time
from waiting import HUNG_SECONDS
from windlass.errors import BadInput
from windlass.runtime.fleet.protocol import channel as channel_module
from windlass.runtime.fleet.protocol.channel import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    TAG_BYTES,
    Channel,
    ChannelLost,
    accept,
    dial,
    keep_alive,
)
from windlass.runtime.fleet.protocol.handshake import (
    MAX_HELLO_BYTES,
    PROOF_REFUSED,
    ROOT,
    WORKER,
    Handshake,
    NotAdmitted,
    SigningKeys,
)
from windlass.runtime.fleet.protocol.messages import EndEpoch, EpochKeyFound, EpochKeyMissing, FromRoot, Goodbye, Heartbeat
from windlass.runtime.fleet.protocol.secret import read_secret, warning

pytestmark = pytest.mark.pure

SECRET, OTHER = b"sixteen bytes and more", b"sixteen other bytes!"
messages = st.one_of(
    st.builds(EpochKeyFound, st.integers(0, 2**40), st.binary(max_size=300)),
    st.builds(EpochKeyMissing, st.integers(0, 9), st.text(max_size=40)),
    st.builds(EndEpoch, st.integers(0, 9)),
    st.just(Heartbeat()),
)


class Written:
    """A writer that keeps what was written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


KEYS = SigningKeys(b"root's own key", b"worker's own key")


def frames_of(said: list[Any]) -> list[bytes]:
    """As the root writes them, one by one."""
    found: list[bytes] = []
    writer = Written()
    sender: Any = Channel(None, writer, KEYS, FromRoot)  # type: ignore[arg-type]
    for one in said:
        writer.data = b""
        sender.post(one)
        found.append(writer.data)
    return found


def heard(pieces: list[bytes]) -> tuple[list[Any], str]:
    """What the worker understands, and why it then ends the connection."""

    async def listen() -> tuple[list[Any], str]:
        reader = asyncio.StreamReader()
        for piece in pieces:
            reader.feed_data(piece)
        reader.feed_eof()
        listener: Any = Channel(reader, Written(), SigningKeys(KEYS.theirs, KEYS.mine), FromRoot)  # type: ignore[arg-type]
        found: list[Any] = []
        while True:
            try:
                found.append(await listener.receive())
            except ChannelLost as error:
                return found, str(error)

    return asyncio.run(listen())


@given(st.lists(messages, max_size=5), st.lists(st.integers(0, 2000), max_size=6))
def test_what_is_said_arrives_in_whatever_pieces(said: list[Any], cuts: list[int]) -> None:
    data = b"".join(frames_of(said))
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[start:stop] for start, stop in itertools.pairwise(edges)]
    found, why = heard(pieces)
    assert found == said
    assert "closed the connection" in why


@given(st.lists(messages, min_size=1, max_size=4), st.data())
def test_what_was_changed_ends_the_connection(said: list[Any], data: st.DataObject) -> None:
    """A bit, a piece left out or put in: what came before stands, and nothing after it does."""
    whole = b"".join(frames_of(said))
    at = data.draw(st.integers(0, len(whole) - 1))
    how = data.draw(st.sampled_from(["flip", "drop", "insert"]))
    if how == "flip":
        changed = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    elif how == "drop":
        changed = whole[:at] + whole[at + data.draw(st.integers(1, 40)) :]
    else:
        changed = whole[:at] + data.draw(st.binary(min_size=1, max_size=40)) + whole[at:]
    if changed.startswith(whole):  # what was put in came after all of it
        return
    found, why = heard([changed])
    assert len(found) < len(said) + (how == "insert") and found == said[: len(found)]
    assert why


@given(st.lists(messages, min_size=2, max_size=5, unique_by=repr), st.data())
def test_frames_cannot_be_said_again_left_out_or_swapped(said: list[Any], data: st.DataObject) -> None:
    frames = frames_of(said)
    first = data.draw(st.integers(0, len(frames) - 2))
    second = data.draw(st.integers(first + 1, len(frames) - 1))
    swapped = [*frames]
    swapped[first], swapped[second] = frames[second], frames[first]
    for changed in (frames[: first + 1] + frames[first:], frames[:first] + frames[first + 1 :], swapped):
        found, why = heard(changed)
        assert found == said[: len(found)] and len(found) <= first + 1
        assert "the signature of frame" in why


def test_a_key_travels_covered_and_both_sides_know_it() -> None:
    one: Any = Channel(None, Written(), KEYS, FromRoot)  # type: ignore[arg-type]
    other: Any = Channel(None, Written(), SigningKeys(KEYS.theirs, KEYS.mine), FromRoot)  # type: ignore[arg-type]
    stranger: Any = Channel(None, Written(), SigningKeys(KEYS.theirs, b"another"), FromRoot)  # type: ignore[arg-type]
    key = bytes(range(32))
    covered = one.mask_key(key, "key of epoch 1")
    assert covered != key != one.mask_key(key, "key of epoch 2") != covered
    assert other.mask_key(covered, "key of epoch 1") == key
    assert stranger.mask_key(covered, "key of epoch 1") != key


@given(st.binary(max_size=400))
def test_other_bytes_are_no_message(garbage: bytes) -> None:
    found, why = heard([garbage])
    assert found == [] and why


def test_one_direction_is_not_the_other() -> None:
    """What a side has said, given back to it."""
    writer = Written()
    worker: Any = Channel(None, writer, SigningKeys(KEYS.theirs, KEYS.mine), FromRoot)  # type: ignore[arg-type]
    worker.post(Heartbeat())
    found, why = heard([writer.data])
    assert found == [] and "the signature of frame" in why


@pytest.mark.parametrize("length", [0, TAG_BYTES - 1, MAX_FRAME_BYTES + TAG_BYTES + 1, 2**32 - 1])
def test_a_length_that_cannot_be_is_refused_before_anything_is_read(length: int) -> None:
    found, why = heard([length.to_bytes(LENGTH_BYTES, "big") + bytes(64)])
    assert found == [] and "a frame of" in why


def test_a_signed_word_that_is_none_ends_the_connection() -> None:
    writer = Written()
    seal = channel_module.FrameSigner(KEYS.mine)
    writer.write(seal.frame(msgspec.msgpack.encode(["Unheard", 1])))
    assert "cannot be decoded" in heard([writer.data])[1]


# --- the handshake


def shaken(root: Handshake, worker: Handshake) -> None:
    worker.receive_hello(root.hello)
    root.receive_hello(worker.hello)
    worker.receive_proof(root.proof())
    root.receive_proof(worker.proof())


def test_both_have_the_same_keys_and_nobody_else_has() -> None:
    root, worker, again = Handshake(SECRET, ROOT), Handshake(SECRET, WORKER), Handshake(SECRET, ROOT)
    shaken(root, worker)
    assert root.keys() == tuple(reversed(worker.keys()))
    assert len({*root.keys(), *Handshake(SECRET, ROOT).keys()}) == 4, "other numbers, other keys"
    shaken(again, Handshake(SECRET, WORKER))
    assert not {*again.keys()} & {*root.keys()}


def test_the_secret_must_be_the_same() -> None:
    root, worker = Handshake(SECRET, ROOT), Handshake(OTHER, WORKER)
    with pytest.raises(NotAdmitted, match="the root does not know the secret"):
        shaken(root, worker)
    with pytest.raises(NotAdmitted, match="the worker has another secret"):
        root.receive_proof(PROOF_REFUSED)


def test_versions_must_be_the_same_and_both_are_named() -> None:
    root, worker = Handshake(SECRET, ROOT, "0.9 (protocol 7)"), Handshake(SECRET, WORKER, "1.0\n\x1b[31m" + "x" * 99)
    with pytest.raises(
        NotAdmitted, match=r"the worker is Windlass 1\.0\?\?\[31mx+\.\.\.x+, this root 0\.9 \(protocol 7\)"
    ) as raised:
        root.receive_hello(worker.hello)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 200
    with pytest.raises(NotAdmitted, match=r"the root is Windlass 0\.9"):
        worker.receive_hello(root.hello)


def test_a_proof_is_of_no_use_again_nor_to_the_other_side() -> None:
    root, worker = Handshake(SECRET, ROOT), Handshake(SECRET, WORKER)
    shaken(root, worker)
    later = Handshake(SECRET, WORKER)
    later.receive_hello(root.hello)  # all that was heard is said again
    with pytest.raises(NotAdmitted):
        later.receive_proof(root.proof())
    mirrored = Handshake(SECRET, ROOT)
    mirrored.receive_hello(mirrored.hello)  # a stranger that gives back what it hears
    with pytest.raises(NotAdmitted):
        mirrored.receive_proof(mirrored.proof())


@given(st.data())
def test_no_other_bytes_are_a_proof(data: st.DataObject) -> None:
    root, worker = Handshake(SECRET, ROOT), Handshake(SECRET, WORKER)
    worker.receive_hello(root.hello)
    root.receive_hello(worker.hello)
    proof = root.proof()
    at = data.draw(st.integers(0, len(proof) - 1))
    changed = data.draw(
        st.one_of(
            st.binary(max_size=80),
            st.integers(1, 500).map(lambda depth: b"\x92\xa5proof" + b"\x91" * depth),
            st.integers(1, 255).map(lambda bits: proof[:at] + bytes([proof[at] ^ bits]) + proof[at + 1 :]),
            st.just(proof[:at]),
        )
    )
    with pytest.raises(NotAdmitted):
        worker.receive_proof(changed)


@given(st.binary(max_size=80))
def test_no_other_bytes_are_a_hello(data: bytes) -> None:
    with pytest.raises(NotAdmitted):
        Handshake(SECRET, WORKER).receive_hello(data)


# --- over sockets


def served(
    answer: Callable[[socket.socket], Coroutine[Any, Any, Any]], ask: Callable[[int], Coroutine[Any, Any, Any]]
) -> tuple[Any, Any]:
    """What each side came to, or raised."""

    async def both() -> tuple[Any, Any]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)

            async def serve() -> Any:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                with connection:
                    return await answer(connection)

            found = await asyncio.gather(serve(), ask(listening.getsockname()[1]), return_exceptions=True)
            return found[0], found[1]

    return asyncio.run(both())


async def keep(connection: socket.socket, secret: bytes = SECRET) -> Any:
    found = await accept(connection, secret)
    try:
        return await found.receive()
    finally:
        found.close()


async def ask(port: int, secret: bytes = SECRET, seconds: float = HUNG_SECONDS) -> Any:
    found = await dial("127.0.0.1", port, secret, seconds)
    await found.send(Goodbye("done"))
    found.close()
    return found.local_address, found.address


def test_root_and_worker_meet() -> None:
    assert served(keep, ask) == (Goodbye("done"), ("127.0.0.1", "127.0.0.1"))


def test_another_secret_is_told_to_both() -> None:
    worker, root = served(keep, lambda port: ask(port, OTHER))
    assert isinstance(worker, NotAdmitted) and "does not know the secret" in str(worker)
    assert isinstance(root, NotAdmitted) and "has another secret" in str(root) and "127.0.0.1:" in str(root)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"", ChannelLost, "closed"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", NotAdmitted, "does not speak Windlass"),
        ((MAX_HELLO_BYTES + 1).to_bytes(4, "big") + bytes(600), NotAdmitted, "does not speak Windlass"),
        ((30).to_bytes(4, "big") + bytes(10), ChannelLost, "closed"),
    ],
)
def test_somebody_else_at_the_port_is_told_apart(answer: bytes, kind: type[Exception], words: str) -> None:
    async def other(connection: socket.socket) -> None:
        await asyncio.get_running_loop().sock_recv(connection, 600)
        connection.sendall(answer)

    _, root = served(other, ask)
    assert isinstance(root, kind) and words in str(root) and "127.0.0.1:" in str(root)


def test_one_who_never_answers_is_given_up() -> None:
    async def nobody(connection: socket.socket) -> None:
        """Listens until the other side has gone, and says nothing."""
        while await asyncio.get_running_loop().sock_recv(connection, 600):
            pass

    _, root = served(nobody, lambda port: ask(port, seconds=0.3))
    assert isinstance(root, ChannelLost) and "did not answer within 0.3 s" in str(root)


def test_a_port_where_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ChannelLost, match=f"127.0.0.1:{port}"):
        asyncio.run(ask(port))


# --- signs of life


class Heard:
    """A wire on which something is heard every so many seconds, by a clock that the test owns."""

    def __init__(self, every_seconds: float) -> None:
        self._every, self.posted = every_seconds, list[Any]()

    @property
    def silent_seconds(self) -> float:
        return asyncio.get_running_loop().time() % self._every

    def post(self, message: Any) -> None:
        self.posted.append(message)


def kept_alive(wire: Any, seconds: float) -> float:
    """For how long, of so many seconds."""

    async def alive() -> float:
        try:
            async with asyncio.timeout(seconds):
                await keep_alive(wire)
        except (ChannelLost, TimeoutError) as error:
            wire.end = error
        return asyncio.get_running_loop().time()

    return owned_time.run(alive())


def test_silence_ends_a_channel_and_life_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed at the next look, four times a second."""
    monkeypatch.setattr(channel_module, "time", owned_time.clock())
    silent, heard_of = Heard(1e9), Heard(3.9)
    assert kept_alive(silent, 3600.0) == 4.25
    assert isinstance(silent.end, ChannelLost) and "no heartbeat for 4.2 s" in str(silent.end)
    assert kept_alive(heard_of, 3600.0) == 3600.0 and isinstance(heard_of.end, TimeoutError)
    assert len(silent.posted) == 5 and heard_of.posted == [Heartbeat()] * 3600


def test_a_process_that_slept_itself_hears_what_came_meanwhile_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that is opened again: an hour is gone between two looks, and with it nobody's silence."""
    slept = {"seconds": 0.0}
    now = lambda: asyncio.get_running_loop().time() + slept["seconds"]  # noqa: E731
    monkeypatch.setattr(channel_module, "time", SimpleNamespace(monotonic=now))

    class Asleep(Heard):
        @property
        def silent_seconds(self) -> float:
            return now() if now() < 7200 else 0.0  # an hour passes, then what came is read

    async def sleep() -> None:
        await asyncio.sleep(2.1)
        slept["seconds"] += 3600.0
        await asyncio.sleep(0.25)
        slept["seconds"] += 3600.0

    async def both() -> None:
        wire: Any = Asleep(1e9)
        async with asyncio.timeout(60):
            await asyncio.gather(sleep(), keep_alive(wire))

    with pytest.raises(TimeoutError):
        owned_time.run(both())


def test_a_long_frame_is_no_silence_and_waiting_for_ourselves_is_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "time", owned_time.clock())

    async def listen() -> None:
        reader = asyncio.StreamReader()
        listener: Any = Channel(reader, Written(), SigningKeys(KEYS.theirs, KEYS.mine), FromRoot)  # type: ignore[arg-type]
        assert listener.silent_seconds == 0.0  # nobody listens yet
        (frame,) = frames_of([EpochKeyFound(1, bytes(5000))])
        receiving = asyncio.create_task(listener.receive())
        for start in range(0, len(frame), 1000):
            await asyncio.sleep(3.0)
            assert listener.silent_seconds == 3.0
            reader.feed_data(frame[start : start + 1000])
        assert (await receiving).value == bytes(5000)
        assert listener.silent_seconds == 0.0

    owned_time.run(listen())


# --- the file


def test_a_secret_is_read_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert read_secret(file) == SECRET
    assert warning(file) == ""
    file.chmod(0o644)
    assert "chmod 600" in warning(file) and "644" in warning(file)


@pytest.mark.parametrize(("content", "words"), [(b"short", "5 bytes"), (b" " * 40, "0 bytes"), (b"x" * 5000, "no secret")])
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=words):
        read_secret(file)
    with pytest.raises(BadInput, match="there is no secret file"):
        read_secret(tmp_path / "none")
