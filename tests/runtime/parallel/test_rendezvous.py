"""Ranks find each other, and nobody else finds them: whoever does not know the key is dropped, and does no harm while it tries."""

from __future__ import annotations

import contextlib
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waiting import HUNG_SECONDS, until
from windlass.runtime.parallel import mesh
from windlass.runtime.parallel.group import GroupLost
from windlass.runtime.parallel.mesh import connect_all
from windlass.runtime.parallel.store import FolderStore

pytestmark = [pytest.mark.pure, pytest.mark.multi]

KEY = b"k" * 32
HOSTS = ("", "127.0.0.1")


class Ranks:
    """Threads that meet; what each returned or raised."""

    def __init__(self, folder: Path) -> None:
        self.board = FolderStore(folder)
        self.met: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self, rank: int, size: int, host: str, key: bytes = KEY, seconds: float = HUNG_SECONDS) -> None:
        def work() -> None:
            try:
                self.met[rank] = connect_all(self.board, "links", rank, size, key, host, seconds)
            except (GroupLost, OSError) as error:
                self.met[rank] = error

        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def join(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(2 * HUNG_SECONDS)
            assert not thread.is_alive(), "hung"
        return self.met

    def address(self, rank: int) -> str:
        return self.board.take(f"links/{rank}", HUNG_SECONDS).decode()

    def close(self) -> None:
        for met in self.met.values():
            for connection in met if isinstance(met, list) else []:
                if connection is not None:
                    connection.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Any:
    made = Ranks(tmp_path / "board")
    yield made
    made.join()
    made.close()


class Clock:
    """That of meetings, which a test moves on."""

    def __init__(self) -> None:
        self._passed, self.sleep = 0.0, time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self._passed

    def pass_by(self, seconds: float) -> None:
        self._passed += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(mesh, "time", made)
    return made


def check_met(met: dict[int, Any], size: int) -> None:
    """Every connection goes where it should, both ways."""
    assert all(isinstance(found, list) for found in met.values()), met
    for rank in range(size):
        assert met[rank][rank] is None
        for other in range(size):
            if other != rank:
                met[rank][other].sendall(bytes([rank]))
    for rank in range(size):
        assert [met[rank][other].recv(9)[0] for other in range(size) if other != rank] == [r for r in range(size) if r != rank]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_meet(ranks: Ranks, host: str, size: int) -> None:
    for rank in reversed(range(size)):
        ranks.start(rank, size, host)
    check_met(ranks.join(), size)


def test_where_the_temporary_folder_has_a_long_name(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a Unix socket has 107 bytes at most."""
    (long := tmp_path / ("long name " * 12)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    for rank in range(2):
        ranks.start(rank, 2, "")
    check_met(ranks.join(), 2)
    assert not list(long.iterdir())


@pytest.mark.parametrize("host", HOSTS)
def test_nobody_listens_after_the_meeting(ranks: Ranks, host: str) -> None:
    for rank in range(2):
        ranks.start(rank, 2, host)
    ranks.join()
    for rank in range(2):
        with pytest.raises(OSError, match=r"refused|No such file"):
            mesh._connected(ranks.address(rank), 2.0)


def test_a_listener_is_on_its_address_alone(ranks: Ranks) -> None:
    ranks.start(0, 2, "127.0.0.2")
    port = int(ranks.address(0).rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), HUNG_SECONDS)
    ranks.start(1, 2, "127.0.0.2")  # and there it was
    check_met(ranks.join(), 2)


def bites(address: str) -> list[Callable[[], Any]]:
    """What strangers do."""

    def say(data: bytes, stay: bool = False) -> Callable[[], Any]:
        def done() -> Any:
            connection = mesh._connected(address, HUNG_SECONDS)
            with contextlib.suppress(OSError):
                connection.sendall(data)
            if stay:
                return connection
            connection.close()
            return None

        return done

    hello = (1).to_bytes(4, "big") + secrets.token_bytes(32)
    return [
        say(b""),
        say(b"", stay=True),
        say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        say(secrets.token_bytes(100_000)),
        say(secrets.token_bytes(7), stay=True),
        say((2**32 - 1).to_bytes(4, "big") + secrets.token_bytes(64)),
        say((0).to_bytes(4, "big") + secrets.token_bytes(64)),
        say(hello, stay=True),
        say(hello + secrets.token_bytes(32)),
        say(hello + bytes(32), stay=True),
        say(hello[:20]),
    ]


@pytest.mark.parametrize("host", HOSTS)
def test_strangers_do_no_harm(ranks: Ranks, host: str) -> None:
    """Many of every kind, more at once than are waited for; ranks come in their midst."""
    ranks.start(0, 3, host)
    held: list[Any] = []
    for number in range(110):
        made = bites(ranks.address(0))
        held.append(made[number % len(made)]())
        if number == 60:
            ranks.start(1, 3, host)
    ranks.start(2, 3, host)
    check_met(ranks.join(), 3)
    for connection in held:
        if connection is not None:
            connection.close()


def test_silent_strangers_do_not_keep_ranks_out(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor before their time is over: here it never is."""
    monkeypatch.setattr(mesh, "PROOF_SECONDS", 24 * 3600.0)
    ranks.start(0, 2, "127.0.0.1")
    address = ranks.address(0)
    held = [mesh._connected(address, HUNG_SECONDS) for _ in range(3 * mesh.MAX_PENDING)]
    ranks.start(1, 2, "127.0.0.1")
    check_met(ranks.join(), 2)
    for connection in held:
        connection.close()


@pytest.mark.parametrize("host", HOSTS)
def test_another_key_is_refused_on_both_sides(ranks: Ranks, host: str, clock: Clock) -> None:
    ranks.start(0, 2, host)
    ranks.start(1, 2, host, key=b"x" * 32)
    until(lambda: 1 in ranks.met)
    clock.pass_by(HUNG_SECONDS)
    met = ranks.join()
    assert isinstance(met[0], GroupLost) and "timed out waiting for rank 1" in str(met[0])
    assert isinstance(met[1], GroupLost) and "does not know this epoch's key" in str(met[1])


def test_a_proof_is_of_one_connection(ranks: Ranks, tmp_path: Path, clock: Clock) -> None:
    """What a rank said once is of no use again: the listener's nonce is another."""
    said: list[bytes] = []

    class Heard(socket.socket):
        def sendall(self, data: Any, *rest: Any) -> None:
            said.append(bytes(data))
            super().sendall(data, *rest)

    def connected(where: str, seconds: float) -> socket.socket:
        host, _, port = where.rpartition(":")
        connection = Heard(socket.AF_INET, socket.SOCK_STREAM)
        connection.settimeout(seconds)
        connection.connect((host, int(port)))
        return connection

    before, mesh._connected = mesh._connected, connected
    try:
        for rank in range(2):
            ranks.start(rank, 2, "127.0.0.1")
        check_met(ranks.join(), 2)
    finally:
        mesh._connected = before
    proved = b"".join(said[:2])
    assert len(proved) == mesh.HELLO_BYTES + mesh.PROOF_BYTES
    again = Ranks(tmp_path / "again")
    again.start(0, 2, "127.0.0.1")
    with mesh._connected(again.address(0), HUNG_SECONDS) as connection:
        connection.sendall(proved)
        answer = b""
        while part := connection.recv(100):
            answer += part
    assert len(answer) == mesh.NONCE_BYTES + mesh.PROOF_BYTES  # a challenge, and no welcome
    clock.pass_by(HUNG_SECONDS)
    assert isinstance(again.join()[0], GroupLost)


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    ranks.start(0, 3, "", seconds=0.5)
    assert "timed out waiting for rank 1, 2" in str(ranks.join()[0])


def test_a_rank_that_is_there_and_cannot_be_reached_is_not_waited_for(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "REACH_SECONDS", 0.5)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        ranks.board.put("links/0", f"127.0.0.1:{nobody.getsockname()[1]}".encode())
        ranks.start(1, 2, "127.0.0.1", seconds=24 * 3600.0)
        assert "rank 1 could not connect to rank 0" in str(ranks.join()[1])


# --- the board


def test_notes_on_a_board(tmp_path: Path) -> None:
    board, other = FolderStore(tmp_path / "board"), FolderStore(tmp_path / "board")
    assert stat.S_IMODE((tmp_path / "board").stat().st_mode) == 0o700
    for key in ("a", "tp dp0 pp0/3", "../x", "é\n"):
        board.put(key, key.encode() * 3)
        assert other.take(key, 1.0) == other.take(key, 0.0) == key.encode() * 3
    assert len(list((tmp_path / "board").iterdir())) == 4
    assert [file.name for file in tmp_path.iterdir()] == ["board"]
    with pytest.raises(GroupLost, match="no rank wrote the key 'b'"):
        board.take("b", 0.05)


def test_a_note_is_waited_for(tmp_path: Path) -> None:
    board = FolderStore(tmp_path)
    threading.Timer(0.1, lambda: board.put("late", b"")).start()
    assert board.take("late", HUNG_SECONDS) == b""
