"""Notes of an epoch: whoever takes one has what was put, whenever it was; whoever waits in vain is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import owned_time
from windlass.runtime.engine.ranks.messages import KeyFound, KeyMissing, PutKey, TakeKey
from windlass.runtime.fleet.protocol.messages import EpochKeyFound, EpochKeyMissing, PutEpochKey, TakeEpochKey
from windlass.runtime.fleet.root import store as store_module
from windlass.runtime.fleet.root.store import EpochStore, StoreClosed

pytestmark = pytest.mark.pure

KEYS = ("a", "b", "tp dp0 pp0/1", "")


@given(st.permutations([*(("put", key) for key in KEYS), *(("take", key) for key in KEYS * 2)]))
def test_a_note_is_found_before_and_after_it_is_put(order: list[tuple[str, str]]) -> None:
    async def run() -> None:
        board, taking = EpochStore(), list[tuple[str, asyncio.Task[bytes]]]()
        for what, key in order:
            if what == "put":
                board.put(key, b"value of " + key.encode())
            else:
                taking.append((key, asyncio.create_task(board.take(key, 5.0))))
            await asyncio.sleep(0)
        for key, task in taking:
            assert await task == b"value of " + key.encode()

    owned_time.run(run())


def test_in_the_words_of_workers_and_of_ranks() -> None:
    async def run() -> list[Any]:
        board, answers = EpochStore(), list[Any]()
        board.handle(TakeEpochKey(1, 7, "key", 5.0), answers.append)
        board.handle_rank(TakeKey(8, "key", 5.0), answers.append)
        board.handle_rank(TakeKey(9, "never", 2.0), answers.append)
        board.handle(TakeEpochKey(1, 10, "never", 2.0), answers.append)
        await asyncio.sleep(0)
        assert answers == []
        board.handle(PutEpochKey(1, "key", b"value"), answers.append)
        board.handle_rank(PutKey("other", b"1"), answers.append)
        await asyncio.sleep(60.0)
        board.handle(TakeEpochKey(1, 11, "other", 0.0), answers.append)
        await asyncio.sleep(1.0)
        return answers

    words = "no rank put 'never' within 2 s"
    assert owned_time.run(run()) == [
        EpochKeyFound(7, b"value"),
        KeyFound(8, b"value"),
        KeyMissing(9, words),
        EpochKeyMissing(10, words),
        EpochKeyFound(11, b"1"),
    ]


def test_whoever_waits_when_an_epoch_ends_is_told() -> None:
    async def run() -> None:
        board = EpochStore()
        waiting = asyncio.create_task(board.take("key", 60.0))
        await asyncio.sleep(0)
        board.close("a worker is lost")
        with pytest.raises(StoreClosed, match="a worker is lost"):
            await waiting
        with pytest.raises(StoreClosed, match="a worker is lost"):
            await board.take("another", 60.0)

    owned_time.run(run())


def test_a_board_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_BYTES", 1000)

    async def run() -> None:
        board = EpochStore()
        for number in range(20):
            board.put(f"key {number}", bytes(100))
        with pytest.raises(StoreClosed, match="ranks put more than"):
            await board.take("key 19", 1.0)
        assert await board.take("key 3", 1.0) == bytes(100)

    owned_time.run(run())
