"""The waist of every run: whoever answers requests is a Client, whether an engine, a server far away, a router or a test's fake.

The protocol is asynchronous, because what stands in front of it (a server, a router, an evaluation) has many requests in flight and
one thread. `SyncClient` is the same for programs that wait: it keeps an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, Protocol, Self, TypeVar

from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores
from windlass.errors import Error

Result = TypeVar("Result")
SECONDS_TO_CANCEL = 2.0


class Unavailable(Error):
    """Whoever should answer is not there: it crashed, was closed, or cannot be reached. Asking again may help."""

    exit_code = 4


class Busy(Unavailable):
    """It is there and has too much to do; asking again later will help."""


class Broken(Error):
    """One answer could not be computed, though nothing was wrong with what was asked; whoever answers is there and goes on.

    Asking the same again will hardly help.
    """

    exit_code = 4


class Late(Error):
    """A request's deadline passed before its answer was whole."""

    exit_code = 4


class Client(Protocol):
    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Deltas until one has a finish reason. Closing the generator early, or cancelling its task, cancels the request."""
        ...

    async def score(self, request: ScoreRequest) -> Scores: ...

    async def info(self) -> Info: ...

    async def close(self) -> None:
        """Gives everything back. Requests in flight end with `Unavailable`."""
        ...


class Tokenizes(Protocol):
    """What a Client with a tokenizer of its own can do besides."""

    async def tokenize(self, text: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Of a text, as it would be read as a prompt; or of a chat's messages, through the template."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Special tokens too."""
        ...


class SyncClient:
    """A Client for programs without an event loop. Usable from several threads.

    An exception that interrupts waiting (KeyboardInterrupt) cancels the request and leaves the client usable.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="windlass-client", daemon=True)
        self._thread.start()

    def generate(self, request: Request) -> Generator[Delta, None, None]:
        deltas = self._client.generate(request)
        try:
            while (delta := self._wait(anext(deltas, None))) is not None:
                yield delta
        finally:
            self._wait(deltas.aclose())

    def score(self, request: ScoreRequest) -> Scores:
        return self._wait(self._client.score(request))

    def info(self) -> Info:
        return self._wait(self._client.info())

    def close(self) -> None:
        """May be called twice."""
        if self._loop.is_closed():
            return
        try:
            self._wait(self._client.close())
            self._wait(_settled())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, awaitable: Any) -> Any:
        ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_awaited(awaitable, ended), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise Unavailable("the request was cancelled because its client was closed") from None
        except BaseException:
            if not future.done():  # waiting was interrupted; what is waited for must end before anything else is asked
                future.cancel()
                ended.wait(SECONDS_TO_CANCEL)
            raise


async def _settled() -> None:
    """Generators that were left early are closed by tasks of their own; the loop must not stop before them."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=SECONDS_TO_CANCEL)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _awaited(awaitable: Awaitable[Result], ended: threading.Event) -> Result:
    try:
        return await awaitable
    finally:
        ended.set()
