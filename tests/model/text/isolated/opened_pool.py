"""A pool of processes that end with the test, and what it is asked."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from subprocesses import children, until_gone
from waiting import HUNG_SECONDS
from windlass.model.text.isolated.pool import IsolatedPool
from windlass.model.text.isolated.process import Vocabulary

PROGRAM = "windlass.model.text.isolated.process"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def schema(value: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


def vocabulary() -> Vocabulary:
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return Vocabulary(tokenizer.to_str(), [0])


@asynccontextmanager
async def opened(known: Callable[[], Vocabulary] | None = vocabulary) -> AsyncGenerator[IsolatedPool]:
    pool = IsolatedPool(known)
    before = set(children(os.getpid(), PROGRAM))
    try:
        async with asyncio.timeout(HUNG_SECONDS):
            yield pool
    finally:
        ours = set(children(os.getpid(), PROGRAM)) - before
        pool.close()
        until_gone(*ours)


def parents(pool: IsolatedPool) -> list[int]:
    """Those that fork workers."""
    found = [pool._templates._process, pool._grammars._process if pool._grammars is not None else None]
    return [process.pid for process in found if process is not None]
