"""A server under load: its model, its dialect, and one run of a load against it."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterable

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput, Error
from windlass.tasks.bench.served.client.connections import Connections
from windlass.tasks.bench.served.client.counters import read_counters, steps_between
from windlass.tasks.bench.served.client.dialect import Dialect, body, find_dialect
from windlass.tasks.bench.served.client.prompts import (
    ANY_VOCABULARY,
    Prompts,
    TextPrompts,
    TokenPrompts,
    sample_text,
    vocabulary_of,
    words_for,
)
from windlass.tasks.bench.served.load import Load
from windlass.tasks.bench.served.record import EngineSteps, LoadRun, RequestRecord
from windlass.tasks.bench.served.runner import Runner
from windlass.wire.client.connection import HttpConnection, ServerAddress
from windlass.wire.schema.models import ModelCard, ModelList
from windlass.wire.schema.tokens import TokenizeRequest, TokenizeResponse

READ_SECONDS = 60.0
MADE_AHEAD = 4096
"""Request bodies made before the clock starts, at most."""
COUNTERS_SECONDS = 1.2
"""Servers refresh their counters about once a second."""
Clock = Callable[[], float]


class TargetInfo(Frozen):
    """What was found out about a server."""

    url: str
    model: str
    context_tokens: int = 0
    """0: it does not say."""
    owner: str = ""
    dialect: Dialect = Dialect()


class Target:
    """Open it, run loads against it, close it."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None, clock: Clock = time.monotonic) -> None:
        """`model`: its name there; None: the first that is listed."""
        self._address = ServerAddress(url)
        self._http = HttpConnection(self._address, api_key, READ_SECONDS)
        self._connections = Connections(self._address.api, api_key, clock)
        self._asked_model, self._clock = model, clock
        self._vocabulary = ANY_VOCABULARY
        self._words: dict[int, int] = {}
        self.info = TargetInfo(url=url, model=model or "")

    async def open(self) -> TargetInfo:
        card = await self._card()
        self._vocabulary = await self._learn_vocabulary(card.id)
        dialect = await find_dialect(self._connections.post, card.id, self._vocabulary, _salt(), self._address.shown)
        context = card.max_model_len if isinstance(card.max_model_len, int) else 0
        self.info = TargetInfo(url=self.info.url, model=card.id, context_tokens=context, owner=card.owned_by, dialect=dialect)
        return self.info

    async def check(self, loads: Iterable[Load]) -> None:
        """Raises BadInput for a load that does not fit; learns how many words make its prompts, if they must be words."""
        for load in loads:
            total = load.prompt_tokens + load.new_tokens
            if self.info.context_tokens and total > self.info.context_tokens:
                raise BadInput(
                    f"{load.shape} tokens do not fit into the {self.info.context_tokens:,} tokens of {self._address.shown}; "
                    "give smaller --prompt-tokens and --new-tokens"
                )
            if self.info.dialect.prompt == "text" and load.prompt_tokens not in self._words:
                self._words[load.prompt_tokens] = await self._count_words(load.prompt_tokens)

    async def run(self, load: Load, seed: str, done: Callable[[int], None] = lambda _: None) -> LoadRun:
        prompts = self._prompts(seed)
        made = _made_ahead(load, lambda number: self._body(prompts, number, load))

        async def send(number: int, due: float) -> RequestRecord:
            asked = made.pop(number, None) or self._body(prompts, number, load)
            return await self._connections.post(self.info.dialect.path, asked, due)

        runner = Runner(load, send, self._clock, seed=seed, done=done)
        before = await self._counters()
        gc.collect()
        gc.disable()  # a collection in the middle would look like a pause of the server
        try:
            began, cpu = self._clock(), time.process_time()
            records = await runner.run()
            cpu, ended = time.process_time() - cpu, self._clock()
        finally:
            gc.enable()
        steps = await self._steps_since(before)
        return LoadRun(load=load, began=began, ended=ended, records=records, client_cpu_seconds=cpu, steps=steps)

    async def close(self) -> None:
        self._connections.close()
        await self._http.close()

    # --- what it is

    async def _card(self) -> ModelCard:
        raw = await self._http.get(f"{self._address.api}/models")
        try:
            cards = msgspec.json.decode(raw, type=ModelList).data
        except DECODE_ERRORS:
            raise BadInput(
                f"{self._address.shown} is not an OpenAI-compatible server: its /models is no list of models"
            ) from None
        found = [card for card in cards if self._asked_model in (None, card.id)]
        if not found:
            listed = ", ".join(card.id for card in cards[:8]) or "none"
            raise BadInput(f"{self._address.shown} does not serve {self._asked_model or 'a model'}; it lists {listed}")
        return found[0]

    async def _learn_vocabulary(self, model: str) -> tuple[int, ...]:
        """Its ordinary tokens, if it tokenizes as we and vLLM do."""
        asked = msgspec.json.encode(TokenizeRequest(model=model, prompt=sample_text()))
        try:
            raw = await self._http.post(f"{self._address.root}/tokenize", asked)
            return vocabulary_of(msgspec.json.decode(raw, type=TokenizeResponse).tokens)
        except (Error, *DECODE_ERRORS):
            return ANY_VOCABULARY

    # --- prompts

    def _prompts(self, seed: str) -> Prompts:
        if self.info.dialect.prompt == "ids":
            return TokenPrompts(vocabulary=self._vocabulary, seed=seed, salt=_salt())
        return TextPrompts(words=self._words, seed=seed, salt=_salt())

    def _body(self, prompts: Prompts, number: int, load: Load) -> bytes:
        return body(self.info.dialect, self.info.model, prompts.prompt(number, load.prompt_tokens), load.new_tokens)

    async def _count_words(self, tokens: int) -> int:
        async def count(words: int) -> int:
            prompt = TextPrompts(words={}, salt=_salt()).prompt(0, words)
            asked = body(self.info.dialect, self.info.model, prompt, 1)
            return (await self._connections.post(self.info.dialect.path, asked)).prompt_tokens

        return await words_for(tokens, count)

    # --- its own counters

    async def _counters(self) -> dict[str, float]:
        try:
            return read_counters((await self._http.get(f"{self._address.root}/metrics")).decode(errors="replace"))
        except Error:
            return {}

    async def _steps_since(self, before: dict[str, float]) -> EngineSteps | None:
        if not before:
            return None
        await asyncio.sleep(COUNTERS_SECONDS)
        return steps_between(before, await self._counters())


def _made_ahead(load: Load, make: Callable[[int], bytes]) -> dict[int, bytes]:
    count = load.requests if load.requests is not None else load.at_once or round(load.rate * (load.seconds or 0.0))
    return {number: make(number) for number in range(min(count, MADE_AHEAD))}


def _salt() -> int:
    return int.from_bytes(os.urandom(6))
