"""Long work beside the event loop, few at a time: a text of megabytes takes seconds to be cut into tokens, and a hundred times its memory.

No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from windlass.text.tokenize.tokenizer import LONG_CHARACTERS

Result = TypeVar("Result")
AT_ONCE = 2
PER_VALUE = 16
"""Characters that take as long as one value of a list or an object, whatever it is."""


class BackgroundPool:
    """Threads of its own: whoever gives up waiting leaves the queue, but not a thread in the middle of its work to somebody else."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """`size`: in characters, or what takes as long; what is short is done at once."""
        if size < LONG_CHARACTERS:
            return work()
        self._threads = self._threads or ThreadPoolExecutor(AT_ONCE, "windlass-text")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def size_of(*values: Any) -> int:
    """Of plain values, in characters; of what is long, not much more than is needed to know it."""
    found, waiting = 0, list(values)
    while waiting and found < LONG_CHARACTERS:
        value = waiting.pop()
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, Mapping):
            held = cast(Mapping[Any, Any], value)
            found += PER_VALUE * (1 + len(held))
            waiting += held.values()
        elif isinstance(value, (list, tuple)):
            items = cast("list[Any] | tuple[Any, ...]", value)
            found += PER_VALUE * (1 + len(items))
            waiting += items
    return found
