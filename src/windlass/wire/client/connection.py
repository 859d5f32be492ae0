"""A connection pool over httpx that raises our errors. httpx is imported on first use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from windlass.core.client import Unavailable
from windlass.errors import BadInput, MissingExtra
from windlass.wire.client.errors import error_from_response, read_error, read_retry_after
from windlass.wire.client.url import LOOPBACK
from windlass.wire.sse import DONE, BrokenEventStream, EventParser

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 10.0
DRAIN_SECONDS = 1.0
"""For a server to close its stream after `[DONE]`."""
MAX_ERROR_BYTES = 65_536


class ServerAddress:
    """Accepts `http://host:8000`, `http://host:8000/v1` and URLs with other paths."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise BadInput(f"{url[:200]!r} is not a server URL; use for example http://localhost:8000/v1")
        if parts.username or parts.password:
            raise BadInput("URLs with a user name or password are not supported; pass the key as api_key")
        self.root = url.rstrip("/").removesuffix("/v1")
        self.api = url.rstrip("/") if parts.path.strip("/") else f"{self.root}/v1"
        self.shown = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
        self.is_loopback = parts.hostname in LOOPBACK


class HttpConnection:
    def __init__(self, address: ServerAddress, api_key: str | None, read_seconds: float, transport: Any = None) -> None:
        httpx = _httpx()
        self._address, self._read_seconds = address, read_seconds
        self._http: httpx.AsyncClient = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(read_seconds, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
            trust_env=not address.is_loopback,  # no proxy for loopback
        )

    async def get(self, url: str) -> bytes:
        with self._errors():
            response = await self._http.get(url)
            return self._checked(response, response.content)

    async def post(self, url: str, body: bytes) -> bytes:
        with self._errors():
            response = await self._http.post(url, content=body, headers=_JSON)
            return self._checked(response, response.content)

    async def events(self, url: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The data of events until `[DONE]`. Closing the generator closes the connection, which cancels the request."""
        with self._errors():
            async with self._http.stream("POST", url, content=body, headers=_JSON) as response:
                if response.status_code != 200:
                    self._checked(response, await _start_of(response))
                if "event-stream" not in response.headers.get("content-type", ""):
                    raise Unavailable(f"{self._address.shown} did not return an event stream")
                parser = EventParser()
                async with aclosing(cast(AsyncGenerator[bytes, None], response.aiter_bytes())) as pieces:
                    async for piece in pieces:
                        for data in parser.feed(piece):
                            if data == DONE:
                                await _drain(pieces)
                                return
                            yield data

    async def close(self) -> None:
        await self._http.aclose()

    def _checked(self, response: httpx.Response, body: bytes) -> bytes:
        if response.status_code == 200:
            return body
        raise error_from_response(response.status_code, read_error(body), read_retry_after(response.headers.get("retry-after")))

    @contextmanager
    def _errors(self) -> Generator[None]:
        httpx, shown = _httpx(), self._address.shown
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise Unavailable(f"{shown} is unreachable; is a server running there?") from None
        except httpx.TimeoutException:
            raise Unavailable(
                f"{shown} sent no data for {self._read_seconds:g} seconds; raise the timeout if it is only slow"
            ) from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise BadInput(f"{shown} is not a server URL: {error}") from None
        except (httpx.TransportError, httpx.StreamError, httpx.DecodingError, BrokenEventStream) as error:
            raise Unavailable(f"the connection to {shown} was lost ({type(error).__name__})") from None


_JSON = {"content-type": "application/json"}


async def _drain(pieces: AsyncGenerator[bytes, None]) -> None:
    """Reads a finished response to its end, so that the connection can be reused."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for _ in pieces:
                pass


async def _start_of(response: httpx.Response) -> bytes:
    found = b""
    async for piece in response.aiter_bytes():
        found += piece
        if len(found) > MAX_ERROR_BYTES:
            break
    return found[:MAX_ERROR_BYTES]


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError:
        raise MissingExtra("httpx", "serve", "talking to a server") from None
    return httpx
