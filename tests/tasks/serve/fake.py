"""A Client that stands in for an engine: bytes are tokens, answers are scripted, and it breaks when told to.

What it says follows from the request alone, so tests know what to expect: `w0 w1 w2 ...`, a call where a tool must be called, and
something of the right form where a constraint asks for one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from windlass.core.client import Late, Unavailable
from windlass.core.request import (
    Delta,
    Embedding,
    EmbedRequest,
    Info,
    Request,
    ScoreRequest,
    Scores,
    Stats,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
    tool_name,
)
from windlass.errors import BadInput, TooLong

CONTEXT = 4096
DEFAULT_TOKENS = 8


class FakeClient:
    """`seconds`: between tokens. `slots`: how many answers are given at once; the others wait.

    `hold_after`: every answer stops after so many tokens, until a test says `release`.
    """

    def __init__(
        self,
        seconds: float = 0.0,
        slots: int = 16,
        tokens: int = DEFAULT_TOKENS,
        first_seconds: float = 0.0,
        hold_after: int | None = None,
    ) -> None:
        self.seconds, self.tokens, self.first_seconds = seconds, tokens, first_seconds
        self._hold_after, self._released = hold_after, asyncio.Event()
        self.slots = slots
        self._free = asyncio.Semaphore(slots)
        self.requests: list[Request] = []
        self.running = self.waiting = 0
        self.most_running = 0
        self.cancelled = self.finished = 0
        self.is_alive = True
        self.closed = False
        self.starts = 1
        self.start_seconds = 0.0
        self.refuse_starts = 0
        self.start_error: Exception = Unavailable("the engine's process ended with status 1: /secret/path")
        self.is_stuck = False
        self.restarted = 0
        self._lives: set[asyncio.Future[None]] = set()

    # --- what tests do to it

    def release(self) -> None:
        self._released.set()

    def crash(self) -> None:
        self.is_alive = False
        for life in list(self._lives):
            if not life.done():
                life.set_exception(Unavailable("the engine's process was ended by SIGKILL: /secret/path"))

    # --- Client

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        if not self.is_alive:
            await self._start()
        tokens = prompt_tokens(request)
        limit = self._limit(request, len(tokens))
        self.requests.append(request)
        life: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lives.add(life)
        self.waiting += 1
        is_running = is_finished = False
        try:
            await self._or_death(self._free.acquire(), life)
            self.waiting -= 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            is_running = True
            async for delta in self._deltas(request, tokens, limit, life):
                yield delta
            is_finished = True
        finally:
            self._lives.discard(life)
            life.cancel() if not life.done() else life.exception()
            if is_running:
                self.running -= 1
                self._free.release()
            else:
                self.waiting -= 1
            self.finished += is_finished
            self.cancelled += not is_finished

    async def _deltas(
        self, request: Request, tokens: list[int], limit: int, life: asyncio.Future[None]
    ) -> AsyncGenerator[Delta, None]:
        began = asyncio.get_running_loop().time()
        last: Delta | None = None
        if self.first_seconds:
            await self._or_death(asyncio.sleep(self.first_seconds), life)
        for number, delta in enumerate(script(request, limit)):
            if last is not None:
                yield last
            if number == self._hold_after:
                await self._or_death(self._released.wait(), life)
            if self.seconds:
                await self._or_death(asyncio.sleep(self.seconds), life)
            elif number % 16 == 0:
                await asyncio.sleep(0)
            if life.done():
                life.result()
            if request.deadline_seconds is not None and asyncio.get_running_loop().time() - began > request.deadline_seconds:
                raise Late("late")
            last = delta if number or request.prompt_logprobs is None else _with_prompt(delta, tokens, request)
        usage = Usage(prompt_tokens=len(tokens), completion_tokens=limit, cached_tokens=len(tokens) // 2)
        timings = Timings(queue_seconds=0.001, prefill_seconds=0.01, decode_seconds=0.1)
        first = last or (Delta() if request.prompt_logprobs is None else _with_prompt(Delta(), tokens, request))
        reason = "length" if request.max_tokens is not None and request.max_tokens <= limit and not request.tools else "stop"
        yield Delta(
            content=first.content,
            reasoning=first.reasoning,
            tool_calls=first.tool_calls,
            token_ids=first.token_ids,
            logprobs=first.logprobs,
            prompt_logprobs=first.prompt_logprobs,
            finish_reason=reason,
            usage=usage,
            timings=timings,
        )

    def _limit(self, request: Request, prompt: int) -> int:
        wanted = self.tokens if request.max_tokens is None else request.max_tokens
        if prompt == 0:
            raise BadInput("the prompt is empty; it needs at least one token", field="prompt")
        if prompt + (request.max_tokens or 0) > CONTEXT:
            raise TooLong(
                f"prompt of {prompt:,} tokens and {wanted:,} new ones do not fit in {CONTEXT:,} tokens (the context)",
                field="prompt",
            )
        return min(wanted, CONTEXT - prompt)

    async def score(self, request: ScoreRequest) -> Scores:
        tokens = list(request.token_ids) if request.token_ids is not None else list((request.prompt or "").encode())
        return Scores(token_ids=tuple(tokens), logprobs=tuple(_prompt_logprobs(tokens, request.top)))

    async def info(self) -> Info:
        if not self.is_alive:
            await self._start()
        if self.is_stuck:
            await asyncio.sleep(3600)
        stats = Stats(running=self.running, waiting=self.waiting, num_blocks=100, blocks_used=self.running)
        return Info(
            model="fake",
            context_tokens=CONTEXT,
            vocab_size=256,
            max_sequences=self.slots,
            device="cpu",
            scheme="int4",
            stats=stats,
        )

    async def embed(self, request: EmbedRequest) -> Embedding:
        tokens = list(request.token_ids) if request.token_ids is not None else list((request.prompt or "").encode())
        if not tokens:
            raise BadInput("the input is empty; it needs at least one token", field="input")
        return Embedding(vector=(3.0, 4.0, 12.0 if request.pooling == "mean" else 0.0), num_tokens=len(tokens))

    def tokenizer_info(self) -> dict[str, Any]:
        return {"eos_token": "</s>"}

    async def tokenize(
        self,
        text: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        special: bool = True,
        owner: str = "",
    ) -> list[int]:
        return list((text if isinstance(text, str) else rendered(text)).encode())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        if any(token > 255 for token in token_ids):
            raise BadInput("token_ids has a token that the vocabulary of 256 does not have", field="token_ids")
        return bytes(token_ids).decode(errors="replace")

    async def restart(self) -> None:
        self.crash()
        self.is_stuck = False
        self.restarted += 1

    async def close(self) -> None:
        self.closed = True

    async def _start(self) -> None:
        await asyncio.sleep(self.start_seconds)
        if self.refuse_starts:
            self.refuse_starts -= 1
            raise self.start_error
        self.starts += 1
        self.is_alive = True

    async def _or_death(self, awaitable: Any, life: asyncio.Future[None]) -> None:
        """Waits for it, or for the engine's end, whichever comes first."""
        task = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({task, life}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
        finally:
            if not task.done():
                task.cancel()


def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def prompt_tokens(request: Request) -> list[int]:
    if request.token_ids is not None:
        return list(request.token_ids)
    return list((request.prompt if request.prompt is not None else rendered(request.messages or ())).encode())


def script(request: Request, limit: int) -> list[Delta]:
    words = _words(request, limit)
    return [_worded(request, number, word) for number, word in enumerate(words)]


def _words(request: Request, limit: int) -> list[str | ToolCall]:
    must = request.tool_choice not in ("none", "auto")
    if request.tools and request.tool_choice != "none" and (must or _asks_for_tool(request)):
        name = request.tool_choice if must and request.tool_choice != "required" else tool_name(request.tools[0])
        return [ToolCall(id="call_1", name=name, arguments='{"city": "Paris"}')][:limit]
    if request.constraint is not None:
        return [_constrained(request)][:limit]
    return [f"w{number} " for number in range(limit)]


def _asks_for_tool(request: Request) -> bool:
    return "weather" in str((request.messages or ({"content": ""},))[-1]["content"])


def _constrained(request: Request) -> str:
    assert request.constraint is not None
    match request.constraint.kind:
        case "choice":
            return request.constraint.choices[0]
        case "json_schema":
            properties = json.loads(request.constraint.value).get("properties", {}) if request.constraint.value[0] == "{" else {}
            values: dict[str, Any] = {"string": "text", "integer": 1, "number": 1.5, "boolean": True, "array": []}
            return json.dumps({name: values.get(kind.get("type"), {}) for name, kind in properties.items()})
        case _:
            return "{}"


def _worded(request: Request, number: int, word: str | ToolCall) -> Delta:
    if isinstance(word, ToolCall):
        return Delta(tool_calls=(word,), token_ids=(number,))
    logprobs = (_logprob(number % 256, request.logprobs, word),) if request.logprobs is not None else ()
    if request.thinking and number < 2:
        return Delta(reasoning=word, token_ids=(number,), logprobs=logprobs)
    return Delta(content=word, token_ids=(number,), logprobs=logprobs)


def _logprob(token: int, top: int, text: str) -> TokenLogprob:
    alternatives = tuple(TokenLogprob(token_id=other, logprob=-0.5 - other, token=f"t{other}") for other in range(top))
    return TokenLogprob(token_id=token, logprob=-0.5, rank=1, token=text, top=alternatives)


def _prompt_logprobs(tokens: list[int], top: int) -> list[TokenLogprob | None]:
    return [None if not place else _logprob(token, top, chr(token)) for place, token in enumerate(tokens)]


def _with_prompt(delta: Delta, tokens: list[int], request: Request) -> Delta:
    found = tuple(_prompt_logprobs(tokens, request.prompt_logprobs or 0))
    return Delta(
        content=delta.content,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        reasoning=delta.reasoning,
        prompt_logprobs=found,
    )
