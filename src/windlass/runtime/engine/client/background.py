"""Threads for long tokenization, off the event loop: megabytes of text take seconds, and a hundred times their size in memory.

No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from windlass.model.text.tokenize.tokenizer import LONG_CHARACTERS

Result = TypeVar("Result")
MAX_THREADS = 2
CHARACTERS_PER_VALUE = 16
"""What one value of a list or an object costs, in characters."""


class BackgroundPool:
    """A pool of its own. Cancelling a waiting call removes it from the queue; work that has started finishes first."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """`size`: cost in characters; short work is done inline."""
        if size < LONG_CHARACTERS:
            return work()
        self._threads = self._threads or ThreadPoolExecutor(MAX_THREADS, "windlass-text")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def size_of(*values: Any) -> int:
    """Cost of plain values in characters; stops counting soon after LONG_CHARACTERS."""
    total, stack = 0, list(values)
    while stack and total < LONG_CHARACTERS:
        value = stack.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            mapping = cast(Mapping[Any, Any], value)
            total += CHARACTERS_PER_VALUE * (1 + len(mapping))
            stack += mapping.values()
        elif isinstance(value, (list, tuple)):
            items = cast("list[Any] | tuple[Any, ...]", value)
            total += CHARACTERS_PER_VALUE * (1 + len(items))
            stack += items
    return total
