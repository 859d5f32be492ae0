from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hanging import finished

from waiting import HUNG_SECONDS
from windlass.model.text.tokenize.tokenizer import LONG_CHARACTERS
from windlass.runtime.engine.client.background import MAX_THREADS, BackgroundPool, size_of

pytestmark = pytest.mark.pure

EMPTY = {"role": "user", "content": ""}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"enum": list(range(10_000))}}}
PARTS = {"role": "user", "content": [{"type": "text", "text": "x" * LONG_CHARACTERS}]}


@pytest.mark.parametrize(
    ("values", "is_long"),
    [
        (["x" * (LONG_CHARACTERS - 1)], False),
        (["x" * LONG_CHARACTERS], True),
        ([[{"role": "user", "content": "hello"}] * 10], False),
        ([[EMPTY] * 10_000], True),
        ([[PARTS]], True),
        ([[], [TOOL]], True),
        ([None, 3, True, ()], False),
    ],
)
def test_all_that_takes_time_counts(values: list[Any], is_long: bool) -> None:
    assert (size_of(*values) >= LONG_CHARACTERS) == is_long


def test_counting_takes_no_time_itself() -> None:
    """What is known to be long by its own length is not looked into."""
    num_seen = 0

    class Seen(list[int]):
        def __len__(self) -> int:
            nonlocal num_seen
            num_seen += 1
            return super().__len__()

    nested: list[Any] = [[Seen([1, 2])] * 1_000_000]
    assert size_of(nested) >= LONG_CHARACTERS
    assert num_seen == 0
    assert size_of([Seen([1, 2])] * 3) == 16 * 13
    assert num_seen > 0, "it would have been seen"


def test_few_at_once_also_where_nobody_waits_any_more() -> None:
    """Whoever gives up leaves its thread busy; the next must not get another one."""
    running = most = started = 0
    lock, go_on = threading.Lock(), threading.Event()

    def work() -> None:
        nonlocal running, most, started
        with lock:
            running, started = running + 1, started + 1
            most = max(most, running)
        assert go_on.wait(HUNG_SECONDS), "hung"
        with lock:
            running -= 1

    async def run() -> None:
        aside = BackgroundPool()
        tasks = [asyncio.create_task(aside.run(work, LONG_CHARACTERS)) for _ in range(4 * MAX_THREADS)]
        while started < MAX_THREADS:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        threads = set(threading.enumerate())
        last = asyncio.create_task(aside.run(work, LONG_CHARACTERS))
        await asyncio.sleep(0)
        assert set(threading.enumerate()) <= threads, "none is started for it"
        go_on.set()
        await last
        assert await aside.run(threading.get_ident, 0) == threading.get_ident(), "what is short is done at once"
        aside.close()

    finished(run())
    assert most == MAX_THREADS
    assert started == MAX_THREADS + 1, "what was given up in the queue is not begun"
