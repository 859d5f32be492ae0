"""`windlass.Client` and `windlass.AsyncClient`: a model on this machine, or a server anywhere, in three lines.

    from windlass import Client
    client = Client("SmolLM2-135M-Instruct.gguf")       # or Client("http://localhost:8000")
    print(client.chat("Why is the sky blue?"))

Like the command line it is an edge, where names become paths and parts are wired together; nothing in the house imports it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import msgspec

from windlass.core.client import SyncClient
from windlass.core.model import Frozen
from windlass.core.request import (
    Constraint,
    Delta,
    FinishReason,
    Info,
    Request,
    Sampling,
    ScoreRequest,
    Scores,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)
from windlass.errors import BadInput, UnknownName
from windlass.wire.messages import from_messages, to_messages, to_tools

if TYPE_CHECKING:
    from windlass.core.client import Client as CoreClient

Chat = str | Sequence[Mapping[str, Any]]
"""What the user says, or all messages so far, as OpenAI's API has them."""


class Opening(TypedDict, total=False):
    """How a client is opened."""

    api_key: str | None
    """Of a server."""
    model: str | None
    """Of a server that has several; otherwise its first."""
    timeout: float
    """Seconds without a sign of life from a server."""
    device: str
    """Of a model on this machine: auto, cpu, cuda, mps."""
    context_tokens: int | None
    max_sequences: int | None
    kv: str
    exact: bool
    progress: bool
    """Show downloads and compiling on standard error."""


class Asking(TypedDict, total=False):
    """What may be said of an answer, besides what it answers. What is left out is the model's own (or, of a server, the API's) default."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    constraint: Constraint | None
    deadline_seconds: float | None
    cache_salt: str
    tools: Sequence[Mapping[str, Any]]
    """Chats only, as the next two."""
    tool_choice: str
    thinking: bool | None


class Answer(Frozen):
    """All of it. `str(answer)` is its text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    token_ids: tuple[int, ...] = ()
    """Empty where a server does not tell."""
    logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage | None = None
    timings: Timings | None = None

    def __str__(self) -> str:
        return self.content


class AsyncClient:
    """`where`: an http(s) address, or whatever `windlass run` takes: a path, a name of `windlass models`, a name on the hub.

    A model is loaded with the first request, in a process of its own, which `close` (or the end of `async with`) ends.
    """

    def __init__(self, where: str | Path | CoreClient, **opening: Unpack[Opening]) -> None:
        self._client, self._default = opened(where, opening)

    async def chat(self, messages: Chat, *, system: str | None = None, **asking: Unpack[Asking]) -> Answer:
        return await _gathered(self._client, chat_request(messages, system, asking, self._default))

    async def complete(self, prompt: str | Sequence[int], **asking: Unpack[Asking]) -> Answer:
        """Continues a text, or token ids, without a chat template."""
        return await _gathered(self._client, prompt_request(prompt, asking, self._default))

    async def stream(self, messages: Chat, *, system: str | None = None, **asking: Unpack[Asking]) -> AsyncGenerator[str]:
        """The answer's text, piece by piece; `deltas` has reasoning, calls and the rest too."""
        found = self._client.generate(chat_request(messages, system, asking, self._default))
        try:
            async for delta in found:
                if delta.content:
                    yield delta.content
        finally:
            await found.aclose()

    def deltas(self, messages: Chat, *, system: str | None = None, **asking: Unpack[Asking]) -> AsyncGenerator[Delta]:
        return self._client.generate(chat_request(messages, system, asking, self._default))

    async def score(self, text: str | Sequence[int], *, start: int = 0, top: int = 0) -> Scores:
        """How likely every token of a text is, given those before it."""
        return await self._client.score(score_request(text, start, top))

    async def info(self) -> Info:
        return await self._client.info()

    async def close(self) -> None:
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client:
    """`AsyncClient` for programs that wait. Usable from several threads."""

    def __init__(self, where: str | Path | CoreClient, **opening: Unpack[Opening]) -> None:
        client, self._default = opened(where, opening)
        self._client = SyncClient(client)

    def chat(self, messages: Chat, *, system: str | None = None, **asking: Unpack[Asking]) -> Answer:
        return answer_of(self._client.generate(chat_request(messages, system, asking, self._default)))

    def complete(self, prompt: str | Sequence[int], **asking: Unpack[Asking]) -> Answer:
        """Continues a text, or token ids, without a chat template."""
        return answer_of(self._client.generate(prompt_request(prompt, asking, self._default)))

    def stream(self, messages: Chat, *, system: str | None = None, **asking: Unpack[Asking]) -> Generator[str]:
        """The answer's text, piece by piece; `deltas` has reasoning, calls and the rest too."""
        found = self._client.generate(chat_request(messages, system, asking, self._default))
        try:
            for delta in found:
                if delta.content:
                    yield delta.content
        finally:
            found.close()

    def deltas(self, messages: Chat, *, system: str | None = None, **asking: Unpack[Asking]) -> Generator[Delta]:
        return self._client.generate(chat_request(messages, system, asking, self._default))

    def score(self, text: str | Sequence[int], *, start: int = 0, top: int = 0) -> Scores:
        """How likely every token of a text is, given those before it."""
        return self._client.score(score_request(text, start, top))

    def info(self) -> Info:
        return self._client.info()

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- requests --------------------------------------------------------------------------------------------------------

_SAMPLING = frozenset(field.name for field in msgspec.structs.fields(Sampling))
_TUPLES = ("stop", "stop_token_ids", "tools")


def chat_request(messages: Chat, system: str | None, asking: Asking, default: Sampling) -> Request:
    given: Sequence[Mapping[str, Any]] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if system is not None:
        given = [{"role": "system", "content": system}, *given]
    return Request(messages=from_messages(to_messages(given)), **_fields(asking, default))


def prompt_request(prompt: str | Sequence[int], asking: Asking, default: Sampling) -> Request:
    return Request(**_text_or_ids(prompt), **_fields(asking, default))


def score_request(text: str | Sequence[int], start: int, top: int) -> ScoreRequest:
    return ScoreRequest(**_text_or_ids(text), start=start, top=top)


def _text_or_ids(text: str | Sequence[int]) -> dict[str, Any]:
    return {"prompt": text} if isinstance(text, str) else {"token_ids": tuple(text)}


def _fields(asking: Asking, default: Sampling) -> dict[str, Any]:
    unknown = asking.keys() - Asking.__annotations__.keys()
    if unknown:
        raise UnknownName("argument", min(unknown), Asking.__annotations__)
    sampling = {name: value for name, value in asking.items() if name in _SAMPLING}
    fields: dict[str, Any] = {name: value for name, value in asking.items() if name not in _SAMPLING}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    if fields.get("tools"):
        fields["tools"] = msgspec.to_builtins(to_tools(fields["tools"]))
    for name in fields.keys() & _TUPLES:
        fields[name] = tuple(fields[name])
    return {"sampling": msgspec.structs.replace(default, **sampling), **fields}


# --- answers ---------------------------------------------------------------------------------------------------------


async def _gathered(client: CoreClient, request: Request) -> Answer:
    found = client.generate(request)
    try:
        return answer_of([delta async for delta in found])
    finally:
        await found.aclose()


def answer_of(deltas: Iterable[Delta]) -> Answer:
    found = list(deltas)
    end = found[-1] if found else Delta()
    return Answer(
        content="".join(delta.content for delta in found),
        reasoning="".join(delta.reasoning for delta in found),
        tool_calls=tuple(call for delta in found for call in delta.tool_calls),
        finish_reason=end.finish_reason or "cancelled",
        token_ids=tuple(token for delta in found for token in delta.token_ids),
        logprobs=tuple(entry for delta in found for entry in delta.logprobs),
        usage=end.usage,
        timings=end.timings,
    )


# --- opening ---------------------------------------------------------------------------------------------------------

_OF_SERVER = frozenset({"api_key", "model", "timeout"})
_OF_LAUNCH = ("device", "kv", "exact", "context_tokens", "max_sequences")


def opened(where: str | Path | CoreClient, opening: Opening) -> tuple[CoreClient, Sampling]:
    """The client, and how it samples where nothing is said."""
    unknown = opening.keys() - Opening.__annotations__.keys()
    if unknown:
        raise UnknownName("argument", min(unknown), Opening.__annotations__)
    if isinstance(where, Path):
        return _local(str(where), opening)
    if not isinstance(where, str):
        _check_none(opening.keys(), "a client that is opened here, not for one that is given")
        return where, Sampling()
    if not where.startswith(("http://", "https://")):
        return _local(where, opening)
    _check_none(opening.keys() - _OF_SERVER - {"progress"}, "a model on this machine, not for a server")
    from windlass.wire.client.http_client import HttpClient

    options: dict[str, Any] = {name: value for name, value in opening.items() if name in _OF_SERVER}
    return HttpClient(where, **options), Sampling()


def _local(word: str, opening: Opening) -> tuple[CoreClient, Sampling]:
    """As `windlass run` does it: the same names, the same defaults."""
    _check_none(opening.keys() & _OF_SERVER, "a server, not for a model on this machine")
    from importlib.util import find_spec

    from windlass.errors import MissingExtra

    if find_spec("torch") is None:
        raise MissingExtra("torch", "run", "running a model")
    from windlass.cli.run.options import RunOptions, settings_from
    from windlass.core.launch import Launch
    from windlass.engine.client.client import open_client
    from windlass.open.compile import compile_kernels
    from windlass.open.generation import read_generation_config
    from windlass.open.resolve import model_files

    shown = opening.get("progress", False)
    path = model_files(word, shown)
    compile_kernels(shown)
    options: dict[str, Any] = {name: value for name, value in opening.items() if name in _OF_LAUNCH}
    return open_client(Launch(model=str(path), **options)), settings_from(RunOptions(), read_generation_config(path)).made()


def _check_none(names: Iterable[str], what: str) -> None:
    for name in sorted(names):
        raise BadInput(f"{name} is for {what}; leave it out")
