"""The Client protocol: everything that answers requests implements it, whether an engine, a remote server, a router or a test's fake.

It is asynchronous, because its users (a server, a router, an evaluation) have many requests in flight on one thread. `SyncClient`
is the blocking version; it runs an event loop in its own thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, Protocol, Self, TypeVar

from windlass.core.request import Delta, Embedding, EmbedRequest, Info, Request, ScoreRequest, Scores
from windlass.errors import Error

Result = TypeVar("Result")
SECONDS_TO_CANCEL = 2.0


class Unavailable(Error):
    """The engine or server is unavailable: it crashed, was closed, or is unreachable. Retrying may help."""

    exit_code = 4


class Busy(Unavailable):
    """Overloaded; retry later."""


class Slowed(Busy):
    """Refused for a while: too many of this user's requests needed more than they are given, or ended an engine."""

    def __init__(self, message: str, seconds: float = 60.0) -> None:
        """`seconds`: how long it is refused."""
        super().__init__(message)
        self.seconds = seconds


class Broken(Error):
    """Generation failed for one valid request, for example with NaN logits; others are not affected. Retrying will hardly help."""

    exit_code = 4


class Late(Error):
    """The request's deadline passed before its output was complete."""

    exit_code = 4


class Client(Protocol):
    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Deltas until one has a finish reason. Closing the generator early, or cancelling its task, cancels the request."""
        ...

    async def score(self, request: ScoreRequest) -> Scores: ...

    async def info(self) -> Info: ...

    async def close(self) -> None:
        """Releases all resources. Requests in flight raise `Unavailable`."""
        ...


class Tokenizes(Protocol):
    """Additional methods of a Client with a tokenizer."""

    async def tokenize(
        self,
        text: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        special: bool = True,
        owner: str = "",
    ) -> list[int]:
        """A prompt, with its special tokens unless `special` is false; or a chat's messages with its tools, rendered by the template.
        `owner`: as a Request's."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Includes special tokens."""
        ...


class Embeds(Protocol):
    """An additional method of a Client whose engine gives access to hidden states."""

    async def embed(self, request: EmbedRequest) -> Embedding: ...


class SyncClient:
    """A blocking Client. Thread-safe.

    An exception while waiting (KeyboardInterrupt) cancels the request and leaves the client usable.
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
        call = _Call()
        try:
            return asyncio.run_coroutine_threadsafe(call.run(awaitable), self._loop).result()
        except CancelledError:
            raise Unavailable("the request was cancelled because its client was closed") from None
        except BaseException:
            if not call.ended.is_set():  # interrupted; the request must end before the next one starts
                self._loop.call_soon_threadsafe(call.stop)
                call.ended.wait(SECONDS_TO_CANCEL)
            raise


class _Call:
    """An awaitable that runs in the loop's thread. An interrupt may come before its future is known, so it is stopped by this."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._task: asyncio.Task[Any] | None = None
        self._is_stopped = False

    async def run(self, awaitable: Awaitable[Result]) -> Result:
        if self._is_stopped:
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        try:
            return await awaitable
        finally:
            self.ended.set()

    def stop(self) -> None:
        """In the loop's thread."""
        self._is_stopped = True
        if self._task is None:
            self.ended.set()
        else:
            self._task.cancel()


async def _settled() -> None:
    """Abandoned generators are closed by their own tasks; the loop must not stop before them."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=SECONDS_TO_CANCEL)
    await asyncio.get_running_loop().shutdown_asyncgens()
