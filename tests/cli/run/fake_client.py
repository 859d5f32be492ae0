"""A Client that says what it is told to say, for the command line's tests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from waiting import HUNG_SECONDS
from windlass.core.client import SyncClient
from windlass.core.launch import Launch
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores, Timings, Usage
from windlass.errors import BadInput


def _is_awaited() -> bool:
    """The main thread stands in SyncClient's wait for a result, and not on its way there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    standing: list[str] = []
    while frame is not None:
        standing.append(frame.f_code.co_name)
        frame = frame.f_back
    return standing[:3] == ["wait", "result", "_wait"]


class FakeClient:
    """Gives `deltas`, then a last one. `interrupt_after`: after so many, Ctrl-C is pressed."""

    def __init__(
        self,
        deltas: Sequence[Delta] = (Delta(content="Hello", token_ids=(1,)), Delta(content=" you", token_ids=(2, 3))),
        info: Info | None = None,
        interrupt_after: int | None = None,
        refuse_from: int | None = None,
    ) -> None:
        self.deltas, self.interrupt_after, self.refuse_from = deltas, interrupt_after, refuse_from
        self.details = info or Info(model="fake", context_tokens=4096, device="cpu", scheme="int4")
        self.requests: list[Request] = []
        self.cancelled = self.closed = False

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        if self.refuse_from is not None and len(self.requests) > self.refuse_from:
            raise BadInput("prompt of 9,999 tokens does not fit in 4,096")
        finished = False
        try:
            for index, delta in enumerate(self.deltas):
                if index == self.interrupt_after:
                    self.interrupt_after = None
                    while not _is_awaited():  # as with a person: whoever waits for the answer is waiting by then
                        await asyncio.sleep(0.001)
                    os.kill(os.getpid(), signal.SIGINT)
                    await asyncio.sleep(HUNG_SECONDS)
                    raise AssertionError("hung: nobody cancelled the request")
                yield delta
            finished = True
            count = sum(len(delta.token_ids) for delta in self.deltas)
            yield Delta(
                finish_reason="stop",
                usage=Usage(prompt_tokens=7, completion_tokens=count, cached_tokens=2),
                timings=Timings(decode_seconds=0.1),
            )
        finally:
            self.cancelled = self.cancelled or not finished

    async def score(self, request: ScoreRequest) -> Scores:
        raise NotImplementedError

    async def info(self) -> Info:
        return self.details

    async def close(self) -> None:
        self.closed = True


def opener_of(client: FakeClient, seen: list[Launch] | None = None) -> Callable[[Launch, bool], Any]:
    @contextmanager
    def open_fake(launch: Launch, shown: bool) -> Generator[SyncClient]:
        if seen is not None:
            seen.append(launch)
        with SyncClient(client) as sync:
            yield sync

    return open_fake
