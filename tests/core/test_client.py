"""An interrupt may come at any moment, also between starting a call and knowing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from windlass.core.client import SyncClient
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores

pytestmark = pytest.mark.pure


class Endless:
    """Says how its answers ended."""

    def __init__(self) -> None:
        self.closed = 0

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        try:
            while True:
                yield Delta(content="x")
                await asyncio.sleep(0)
        finally:
            self.closed += 1

    async def score(self, request: ScoreRequest) -> Scores:
        raise NotImplementedError

    async def info(self) -> Info:
        return Info(model="endless", context_tokens=1, vocab_size=1)

    async def close(self) -> None: ...


@pytest.mark.parametrize("scheduled", [True, False])
def test_an_interrupt_before_the_future_is_known(monkeypatch: pytest.MonkeyPatch, scheduled: bool) -> None:
    endless = Endless()
    with SyncClient(endless) as client:
        answer = client.generate(Request(prompt="a"))
        next(answer)
        start = asyncio.run_coroutine_threadsafe

        def interrupted(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Any:
            monkeypatch.undo()
            if scheduled:
                start(coroutine, loop)
            else:
                coroutine.close()
            raise KeyboardInterrupt

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(answer)
        assert endless.closed == 1
        assert client.info().model == "endless"
        assert next(client.generate(Request(prompt="b"))).content == "x"
