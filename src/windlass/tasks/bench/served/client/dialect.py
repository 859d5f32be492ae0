"""How a server wants to be asked: which route, token ids or text, and what makes answers as long as asked. Found by asking.

OpenAI-compatible servers differ in which extensions they know; what one ignores, another refuses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from itertools import product
from typing import Any, Literal

import msgspec

from windlass.core.client import Unavailable
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.bench.served.client.prompts import Prompts, TextPrompts, TokenPrompts
from windlass.tasks.bench.served.record import RequestRecord

COMPLETIONS, CHAT = "/completions", "/chat/completions"
NOT_THERE = (404, 405, 501)
REFUSED = (400, 404, 405, 415, 422, 500, 501)
"""Some fail, 500, where others refuse."""
PROBE_TOKENS, PROBE_NEW_TOKENS = 8, 4
_encode = msgspec.json.Encoder().encode


class Dialect(Frozen):
    path: str = COMPLETIONS
    prompt: Literal["ids", "text"] = "ids"
    length: Literal["ignore_eos", "min_tokens", ""] = "ignore_eos"
    """What keeps an answer from ending early; empty: nothing does."""
    max_field: str = "max_tokens"
    usage: bool = True
    """Whether it takes stream_options.include_usage."""

    @property
    def described(self) -> str:
        route = "chat completions" if self.path == CHAT else "completions"
        kind = "token ids" if self.prompt == "ids" else "text"
        return f"{route}, prompts as {kind}, {self.length or 'answers may end early'}"


def body(dialect: Dialect, model: str, prompt: list[int] | str, new_tokens: int) -> bytes:
    """Greedy and streamed."""
    asked: dict[str, Any] = {"model": model, "temperature": 0, "stream": True, dialect.max_field: new_tokens}
    if dialect.path == CHAT:
        asked["messages"] = [{"role": "user", "content": prompt}]
    else:
        asked["prompt"] = prompt
    if dialect.length:
        asked[dialect.length] = True if dialect.length == "ignore_eos" else new_tokens
    if dialect.usage:
        asked["stream_options"] = {"include_usage": True}
    return _encode(asked)


def candidates() -> Iterator[Dialect]:
    """The best first."""
    lengths: tuple[Literal["ignore_eos", "min_tokens", ""], ...] = ("ignore_eos", "min_tokens", "")
    kinds: tuple[Literal["ids", "text"], ...] = ("ids", "text")
    for kind, usage, length in product(kinds, (True, False), lengths):
        yield Dialect(prompt=kind, length=length, usage=usage)
    for usage, field, length in product((True, False), ("max_tokens", "max_completion_tokens"), lengths):
        yield Dialect(path=CHAT, prompt="text", length=length, max_field=field, usage=usage)


Post = Callable[[str, bytes], Awaitable[RequestRecord]]


async def find_dialect(post: Post, model: str, vocabulary: tuple[int, ...], salt: int, where: str) -> Dialect:
    """The first that the server answers. Raises Unavailable or BadInput, with what it said last, if there is none."""
    missing: set[str] = set()
    last = ""
    for number, dialect in enumerate(candidates()):
        if dialect.path in missing:
            continue
        prompts: Prompts = (
            TokenPrompts(vocabulary=vocabulary, salt=salt) if dialect.prompt == "ids" else TextPrompts(words={}, salt=salt)
        )
        asked = body(dialect, model, prompts.prompt(number, PROBE_TOKENS), PROBE_NEW_TOKENS)
        record = await post(dialect.path, asked)
        if record.status == 200 and not record.error:  # without a token too: the model may have nothing to say to this
            return dialect
        last = record.error
        if record.status not in REFUSED:
            raise Unavailable(f"{where} did not answer a short request: {last}")
        if record.status in NOT_THERE:
            missing.add(dialect.path)
    raise BadInput(f"{where} refuses streamed completions and chats: {last}")
