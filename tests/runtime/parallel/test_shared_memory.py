"""Two ranks share memory that has no name left, or, where one of them cannot see it, none."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waiting import HUNG_SECONDS
from windlass.runtime.parallel import shared_memory as shared

pytestmark = pytest.mark.pure


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared, "FOLDER", tmp_path)
    return tmp_path


def between(lower: Callable[[Any], Any], higher: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What both say of a connection between them."""
    ours, theirs = socket.socketpair()
    found: list[Any] = []
    with ours, theirs:
        thread = threading.Thread(target=lambda: found.append(higher(theirs)))
        thread.start()
        first = lower(ours)
        thread.join(HUNG_SECONDS)
    return first, found[0]


def rank_0(connection: Any) -> Any:
    return shared.share_memory([None, connection], [True, True], 0)[1]


def rank_1(connection: Any) -> Any:
    return shared.share_memory([connection, None], [True, True], 1)[0]


def test_both_have_it_and_nobody_else_can(folder: Path) -> None:
    one, other = between(rank_0, rank_1)
    try:
        assert os.pwrite(one, b"heard", 100) and os.pread(other, 5, 100) == b"heard"
        assert os.fstat(one).st_size == shared.FILE_BYTES and stat.S_IMODE(os.fstat(one).st_mode) == 0o600
        assert list(folder.iterdir()) == []
    finally:
        os.close(one)
        os.close(other)


def test_where_there_is_no_such_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared, "FOLDER", tmp_path / "missing")
    assert between(rank_0, rank_1) == (None, None)


def test_ranks_of_other_machines_do_not_ask() -> None:
    found = between(
        lambda connection: shared.share_memory([None, connection], [True, False], 0),
        lambda connection: shared.share_memory([connection, None], [False, True], 1),
    )
    assert found == ([None, None], [None, None])


def test_the_other_cannot_see_it(folder: Path) -> None:
    """Two containers, thought to be one machine."""

    def blind(connection: Any) -> bytes:
        name = connection.recv(shared.NAME_BYTES)
        connection.sendall(shared.HAVE_NOT)
        return name

    found, name = between(rank_0, blind)
    assert found is None and name.startswith(b"windlass-")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["windlass-none", "../secret", "small", "link"])
def test_what_is_no_such_file_is_not_taken(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_bytes(bytes(shared.FILE_BYTES))
    (folder / "small").write_bytes(b"x")
    (folder / "link").symlink_to(folder.parent / "secret")

    def offers(connection: Any) -> bytes:
        connection.sendall(name.encode().ljust(shared.NAME_BYTES, b"\0"))
        return connection.recv(9)

    assert between(offers, rank_1) == (shared.HAVE_NOT, None)
