"""Endpoints that answer with numbers: embeddings, and documents ranked by how well they explain a query."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any, cast
from uuid import uuid4

from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from windlass.core.client import Embeds, Tokenizes
from windlass.core.request import Embedding, EmbedRequest, ScoreRequest, Usage
from windlass.errors import TooLong
from windlass.tasks.serve.api.caller import Caller, caller_of
from windlass.tasks.serve.api.endpoints import admitted_tokens, ready_body, send_json, tokenizer_of
from windlass.tasks.serve.api.interrupt import interruptible
from windlass.tasks.serve.service import Service
from windlass.wire.decode import decode
from windlass.wire.schema.embeddings import (
    EmbeddingEntry,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    RerankRequest,
    RerankResponse,
    RerankResult,
    TeiRank,
)
from windlass.wire.schema.errors import ApiError, invalid, unsupported
from windlass.wire.server.requests import TOO_LONG, naming_params, too_long_message

MAX_INPUTS = 256
"""Of one request; and strings between token ids of one text, each of which is tokenized by itself."""


async def embeddings(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    raw = await ready_body(service, scope, receive)
    body, inputs = await service.body_reader.parsed(raw, _embedding_request)
    service.check_model(body.model)
    if body.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "is not supported: inputs are never truncated")
    found = await embed_all(service, inputs, body.pooling or "last", scope, receive, body)
    vectors = [unit_vector(one.vector, body.dimensions) for one in found]
    is_packed = body.encoding_format == "base64"
    data = [EmbeddingEntry(index=index, embedding=_base64(one) if is_packed else one) for index, one in enumerate(vectors)]
    count = sum(one.num_tokens for one in found)
    usage = EmbeddingUsage(prompt_tokens=count, total_tokens=count)
    await send_json(send, EmbeddingResponse(data=data, model=service.model, usage=usage))


def _embedding_request(raw: bytes) -> tuple[EmbeddingRequest, list[Pieces]]:
    body = decode(raw, EmbeddingRequest)
    return body, inputs_of(body.input)


Pieces = str | tuple[str | int, ...]
"""One text: a string, or token ids with strings between them."""


def inputs_of(given: str | dict[str, Any] | list[Any]) -> list[Pieces]:
    """A list that begins with a token id, or has one beside strings, is one text."""
    if isinstance(given, str | dict):
        return [_pieces(given, "input")]
    if not given:
        raise invalid("input", "is empty")
    if any(isinstance(entry, int) for entry in given):
        return [_pieces(given, "input")]
    if len(given) > MAX_INPUTS:
        raise invalid("input", f"has {len(given)} entries; at most {MAX_INPUTS} are allowed per request")
    return [_pieces(entry, f"input[{number}]") for number, entry in enumerate(given)]


def _pieces(entry: str | dict[str, Any] | list[Any], where: str) -> Pieces:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list):
        if not all(isinstance(one, str | int) for one in entry):
            raise invalid(where, "mixes token ids with whole texts; use one kind")
        if sum(isinstance(one, str) for one in entry) > MAX_INPUTS:
            raise invalid(where, f"has more than {MAX_INPUTS} strings between token ids")
        return tuple(entry)
    if set(entry) == {"prompt_string"} and isinstance(entry["prompt_string"], str):
        return entry["prompt_string"]
    parts: Any = entry.get("content")
    if set(entry) != {"content"} or not isinstance(parts, list) or not parts:
        raise invalid(where, "should have `prompt_string`, or `content` with text parts")
    return "".join(_text_part(part, f"{where}.content[{number}]") for number, part in enumerate(cast(list[Any], parts)))


def _text_part(part: Any, where: str) -> str:
    found: dict[str, Any] = cast(dict[str, Any], part) if isinstance(part, dict) else {}
    if found.get("type") != "text" or not isinstance(found.get("text"), str):
        raise unsupported(where, "is not a text; only texts are embedded")
    return found["text"]


async def _given(service: Service, pieces: Pieces) -> dict[str, Any]:
    """As an EmbedRequest's `prompt` or `token_ids`."""
    if isinstance(pieces, str):
        return {"prompt": pieces}
    if not any(isinstance(one, str) for one in pieces):
        return {"token_ids": pieces}
    client, ids = tokenizer_of(service), list[int]()
    for one in pieces:
        ids += await client.tokenize(one, special=False) if isinstance(one, str) else [one]
    return {"token_ids": tuple(ids)}


async def embed_all(
    service: Service, inputs: Sequence[Pieces], pooling: Any, scope: Scope, receive: Receive, body: object
) -> list[Embedding]:
    """One after another, in one place of the queue: other requests go on between them. Those that were made before the client
    disconnected are counted."""
    client, caller = _embeds(service), caller_of(scope)
    service.check_quota(caller.key)
    found: list[Embedding] = []
    try:
        with admitted_tokens(service, caller.share), naming_params(body):
            async with interruptible(receive, service.settings.deadline_seconds):
                for pieces in inputs:
                    found.append(await _embedding(service, client, caller, pieces, pooling))  # noqa: PERF401 - kept if a later one fails
    finally:
        service.charge(caller.key, [Usage(prompt_tokens=one.num_tokens, completion_tokens=0) for one in found])
    return found


async def _embedding(service: Service, client: Embeds, caller: Caller, pieces: Pieces, pooling: Any) -> Embedding:
    try:
        given = await _given(service, pieces)
        return await client.embed(EmbedRequest(**given, pooling=pooling, **_limits(service, caller)))
    except TooLong as error:
        message = too_long_message(str(error), service.info.context_tokens)
        raise ApiError(f"the input is too large: {message}", param="input", code=TOO_LONG) from None


def _embeds(service: Service) -> Embeds:
    client: Any = service.client
    if not hasattr(client, "embed"):
        raise ApiError("this engine gives no embeddings", code="no_embeddings", status=404)
    return client


def unit_vector(vector: Sequence[float], dimensions: int | None = None) -> list[float]:
    """Of length 1, after cutting."""
    if dimensions is not None and dimensions > len(vector):
        raise invalid("dimensions", f"is {dimensions}; this model's embeddings have {len(vector)}")
    kept = vector[:dimensions] if dimensions is not None else vector
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return [value / length for value in kept]


def _base64(vector: Sequence[float]) -> str:
    """Little-endian fp32, as OpenAI's clients read it."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


# --- reranking -------------------------------------------------------------------------------------------------------


async def rerank(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """By query likelihood: exp of the mean log-probability of the query's tokens after the document (arXiv 2204.07496)."""
    raw = await ready_body(service, scope, receive)
    body = await service.body_reader.parsed(raw, lambda raw: decode(raw, RerankRequest))
    service.check_model(body.model)
    texts = _documents(body)
    caller, client = caller_of(scope), tokenizer_of(service)
    service.check_quota(caller.key)
    scores: list[tuple[float, int]] = []
    try:
        with admitted_tokens(service, caller.share), naming_params(body):
            async with interruptible(receive, service.settings.deadline_seconds):
                for text in texts:
                    one = await _relevance(service, client, caller, text, body.query)
                    scores.append(one)
    finally:
        total = sum(count for _, count in scores)
        service.charge(caller.key, [Usage(prompt_tokens=total, completion_tokens=0)])
    order = sorted(range(len(texts)), key=lambda index: -scores[index][0])[: body.top_n]
    if body.texts is not None:
        ranks = [
            TeiRank(index=index, score=scores[index][0], text=texts[index] if body.return_text else UNSET) for index in order
        ]
        await send_json(send, ranks)
        return
    results = [
        RerankResult(
            index=index, relevance_score=scores[index][0], document={"text": texts[index]} if body.return_documents else UNSET
        )
        for index in order
    ]
    usage = EmbeddingUsage(prompt_tokens=total, total_tokens=total)
    await send_json(send, RerankResponse(id=f"rerank-{uuid4().hex}", model=service.model, results=results, usage=usage))


def _documents(body: RerankRequest) -> list[str]:
    """Of Cohere's request (`documents`) or TEI's (`texts`)."""
    if body.max_tokens_per_doc is not None or body.truncate:
        name = "truncate" if body.truncate else "max_tokens_per_doc"
        raise unsupported(name, "is not supported: documents are never truncated")
    if body.raw_scores:
        raise unsupported("raw_scores", "is not supported: scores are probabilities")
    name, other = ("documents", "texts") if body.texts is None else ("texts", "documents")
    given = body.documents if body.texts is None else body.texts
    if given is None:
        raise invalid("documents", "is missing")
    if body.texts is not None and body.documents is not None:
        raise invalid(other, f"cannot be given together with {name}")
    if len(given) > MAX_INPUTS:
        raise invalid(name, f"has {len(given)} entries; at most {MAX_INPUTS} are allowed per request")
    return [_text(document, f"{name}[{number}]") for number, document in enumerate(given)]


def _text(document: str | dict[str, Any], where: str) -> str:
    text: Any = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", "is missing")
    return text


def _limits(service: Service, caller: Caller) -> dict[str, Any]:
    """Of a request of this caller."""
    return {"owner": caller.owner(), "deadline_seconds": service.settings.deadline_seconds}


def _cache_salt(service: Service, caller: Caller) -> str:
    """Keys do not share cached prefixes."""
    return f"{caller.key}:" if len(service.keys) > 1 else ""


async def _relevance(service: Service, client: Tokenizes, caller: Caller, text: str, query: str) -> tuple[float, int]:
    """And the number of tokens."""
    before = await client.tokenize(f"Passage: {text}\nA question about this passage:")
    whole = await client.tokenize(f"Passage: {text}\nA question about this passage: {query}")
    start = next((place for place, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]), len(before))
    salt = _cache_salt(service, caller)
    asked = ScoreRequest(token_ids=tuple(whole), start=start, cache_salt=salt, **_limits(service, caller))
    found = await service.client.score(asked)
    scored = [entry.logprob for entry in found.logprobs[start:] if entry is not None]
    return (math.exp(sum(scored) / len(scored)) if scored else 0.0), len(whole)
