"""A core Client for any OpenAI-compatible server: ours, vLLM's, anyone's.

It does not retry: the caller knows whether a request may be repeated and which other servers there are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from windlass.core.client import Late, Unavailable
from windlass.core.model import Frozen
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores
from windlass.errors import BadInput
from windlass.wire.client.connection import HttpConnection, ServerAddress
from windlass.wire.client.echo import echoed_delta, scores_of
from windlass.wire.client.request_bodies import request_to_chat, request_to_completion, request_to_echo, score_to_completion
from windlass.wire.client.stream_reader import ChatReader, CompletionReader, WholeChat, check_error, parse
from windlass.wire.messages import to_messages
from windlass.wire.schema.completions import CompletionChoice, CompletionResponse
from windlass.wire.schema.errors import ApiError
from windlass.wire.schema.models import OWNER, ModelCard, ModelList
from windlass.wire.schema.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

Result = TypeVar("Result")

WITH_EXTENSIONS = (OWNER, "vllm")
"""`owned_by` of servers that accept extensions of OpenAI's API."""
NOT_THERE = (404, 405, 501)
READ_SECONDS = 600.0


_encode = msgspec.json.Encoder().encode


class ServerInfo(Frozen):
    """From its /v1/models."""

    model: str
    context_tokens: int = 0
    """0: unknown."""
    owner: str = ""

    @property
    def extensions(self) -> bool:
        return self.owner in WITH_EXTENSIONS


class HttpClient:
    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = READ_SECONDS,
        *,
        streams: bool = True,
        transport: Any = None,
    ) -> None:
        """`model` None: the first one listed. `timeout`: seconds without data. `streams` False: answers are asked for as a whole, which
        costs less where nobody reads along. `transport`: httpx's, for tests."""
        self._address = ServerAddress(base_url)
        self._model, self._timeout, self._transport = model, timeout, transport
        self._api_key, self._streams = api_key, streams
        self._open_connection: HttpConnection | None = None
        self._server: ServerInfo | None = None
        self._is_closed = False

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Deltas have no `timings`, and token ids only if the server returns them."""
        until = None if request.deadline_seconds is None else time.monotonic() + request.deadline_seconds
        server = await with_deadline(self._server_info(), until)
        request = _without_unknown_deadline(request, server)
        if request.prompt_logprobs is not None:
            yield await with_deadline(self._echoed(request, server), until)
            return
        is_chat = request.messages is not None
        path, body = await self._body(request, server)
        if not self._streams:
            whole = ChatReader(WholeChat) if is_chat else CompletionReader()
            delta = whole.add(await with_deadline(self._connection.post(f"{self._address.api}{path}", body), until))
            if delta is not None:
                yield delta
            yield whole.end()
            return
        reader = ChatReader() if is_chat else CompletionReader()
        async with aclosing(self._connection.events(f"{self._address.api}{path}", body)) as events:
            while (data := await with_deadline(anext(events, None), until)) is not None:
                delta = reader.add(data)
                if delta is not None:
                    yield delta
        yield reader.end()

    async def score(self, request: ScoreRequest) -> Scores:
        server = await self._server_info()
        choice, prompt_tokens = await self._completion(msgspec.json.encode(score_to_completion(request, server.model)))
        ids = request.token_ids or tuple(choice.prompt_token_ids or ())
        if not ids and request.prompt is not None:
            ids = await self._ids_of(request.prompt)
        return scores_of(choice, request, ids, prompt_tokens)

    async def info(self) -> Info:
        self._server = None  # the server may have restarted with another model
        server = await self._server_info()
        details = {"server": self._address.shown, "owner": server.owner}
        return Info(model=server.model, context_tokens=server.context_tokens, details=details)

    async def tokenize(self, text: str | Sequence[Mapping[str, Any]], owner: str = "") -> list[int]:
        """Needs /tokenize on the server, which ours and vLLM's have. `owner`: nothing to that server, which knows this client."""
        model = (await self._server_info()).model
        asked = (
            TokenizeRequest(model=model, prompt=text)
            if isinstance(text, str)
            else TokenizeRequest(model=model, messages=to_messages(text))
        )
        return parse(await self._post_root("/tokenize", asked), TokenizeResponse).tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        asked = DetokenizeRequest(model=(await self._server_info()).model, tokens=list(token_ids))
        return parse(await self._post_root("/detokenize", asked), DetokenizeResponse).prompt

    async def close(self) -> None:
        self._is_closed = True
        if self._open_connection is not None:
            await self._open_connection.close()

    @property
    def _connection(self) -> HttpConnection:
        if self._is_closed:
            raise Unavailable("the client is closed")
        if self._open_connection is None:
            self._open_connection = HttpConnection(self._address, self._api_key, self._timeout, self._transport)
        return self._open_connection

    async def _server_info(self) -> ServerInfo:
        if self._server is None:
            self._server = await self._fetch_server_info()
        return self._server

    async def _fetch_server_info(self) -> ServerInfo:
        try:
            cards = parse(await self._connection.get(f"{self._address.api}/models"), ModelList).data
        except ApiError as refusal:
            if refusal.status not in NOT_THERE or self._model is None:
                raise
            return ServerInfo(model=self._model)  # servers without /v1/models work too
        found = next((card for card in cards if self._model in (None, card.id)), None)
        if found is None and self._model is None:
            raise Unavailable(f"{self._address.shown} serves no model")
        found = found or ModelCard(id=self._model or "", owned_by="")
        return ServerInfo(model=found.id, context_tokens=found.max_model_len or 0, owner=found.owned_by)

    async def _body(self, request: Request, server: ServerInfo) -> tuple[str, bytes]:
        if request.messages is not None:
            chat = request_to_chat(request, server.model, stream=self._streams, extensions=server.extensions)
            return "/chat/completions", _encode(chat)
        request = await self._limited(request, server)
        completion = request_to_completion(request, server.model, stream=self._streams, extensions=server.extensions)
        return "/completions", _encode(completion)

    async def _limited(self, request: Request, server: ServerInfo) -> Request:
        """Without max_tokens the API generates 16 tokens; a Request without it means no limit."""
        if request.max_tokens is not None:
            return request
        prompt = request.token_ids if request.token_ids is not None else await self._ids_of(request.prompt or "")
        if not server.context_tokens or not prompt:
            raise BadInput(f"{self._address.shown} does not report its context length; set max_tokens")
        return msgspec.structs.replace(request, max_tokens=max(server.context_tokens - len(prompt), 0))

    async def _echoed(self, request: Request, server: ServerInfo) -> Delta:
        if request.messages is not None:
            raise BadInput("prompt log-probabilities are not available for chats; use a prompt or token_ids")
        asked = request_to_echo(await self._limited(request, server), server.model, extensions=server.extensions)
        choice, prompt_tokens = await self._completion(msgspec.json.encode(asked))
        return echoed_delta(choice, request, prompt_tokens)

    async def _completion(self, body: bytes) -> tuple[CompletionChoice, Any]:
        response = parse(await self._connection.post(f"{self._address.api}/completions", body), CompletionResponse)
        check_error(response.error)
        if not response.choices:
            raise Unavailable(f"{self._address.shown} returned no choices")
        return response.choices[0], response.usage

    async def _ids_of(self, prompt: str) -> tuple[int, ...]:
        """Empty if the server has no /tokenize."""
        try:
            return tuple(await self.tokenize(prompt))
        except ApiError:
            return ()

    async def _post_root(self, path: str, body: Any) -> bytes:
        return await self._connection.post(f"{self._address.root}{path}", msgspec.json.encode(body))


def _without_unknown_deadline(request: Request, server: ServerInfo) -> Request:
    """Only our servers take deadlines; for others they are enforced here alone."""
    return request if server.owner == OWNER else msgspec.structs.replace(request, deadline_seconds=None)


async def with_deadline(awaitable: Awaitable[Result], until: float | None) -> Result:
    try:
        async with asyncio.timeout(None if until is None else max(until - time.monotonic(), 0.0)):
            return await awaitable
    except TimeoutError:
        raise Late("request timed out: the deadline passed before the response was complete") from None
