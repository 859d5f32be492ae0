"""`windlass.Client` and `windlass.AsyncClient`: a model on this machine, or a server anywhere, in three lines.

    from windlass import Client
    client = Client("SmolLM2-135M-Instruct.gguf")       # or Client("http://localhost:8000")
    print(client.chat("Why is the sky blue?"))

Like the command line it wires the packages together; no other module imports it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import msgspec

from windlass.core.client import SyncClient
from windlass.core.launch import Launch, check_launch
from windlass.core.layout import Layout
from windlass.core.model import Frozen
from windlass.core.ranks.address import parse_workers
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
from windlass.units import parse_bytes
from windlass.wire.messages import from_messages, to_messages, to_tools

if TYPE_CHECKING:
    from windlass.core.client import Client as CoreClient

Chat = str | Sequence[Mapping[str, Any]]
"""The user's message, or all messages so far, as in OpenAI's API."""


class ClientOptions(TypedDict, total=False):
    """Options of Client and AsyncClient."""

    api_key: str | None
    """For a server."""
    model: str | None
    """For a server with several models; by default its first."""
    timeout: float
    """Seconds without any data from a server."""
    device: str
    """For a local model, like all below: auto, cpu, cuda or mps."""
    context_tokens: int | None
    max_sequences: int | None
    kv: str
    exact: bool
    deterministic: bool
    """The same tokens for a request whatever else runs beside it; on CPUs."""
    quant: str | None
    """Quantize a bf16 or fp32 checkpoint while it loads: int4 or int8."""
    speculate: str
    """How tokens are drafted: auto, off, ngram, mtp or a small model; the answers are the same."""
    host_memory: str | int | None
    """The most host memory to use, as `24GB` or in bytes; weights that do not fit are read from disk while the model runs."""
    disk_folder: str | None
    """Where these are kept; None: they are removed at the end."""
    tp: int
    """Degrees of tensor, pipeline and expert parallelism: ranks are processes of this machine and of the workers."""
    pp: int
    ep: int
    workers: str | Sequence[str]
    """HOST:PORT of machines that run `windlass worker`."""
    secret_file: str
    """The secret that the workers were started with."""
    sync: str
    """How partial sums travel between ranks: exact or int8."""
    progress: bool
    """Show downloads and compiling on standard error."""


class GenerationOptions(TypedDict, total=False):
    """Generation parameters. Defaults are the model's own or, for a server, the API's."""

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
    """Chats only, like the next two."""
    tool_choice: str
    thinking: bool | None


class Answer(Frozen):
    """A complete answer. `str(answer)` is its text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    token_ids: tuple[int, ...] = ()
    """Empty if a server does not send them."""
    logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage | None = None
    timings: Timings | None = None

    def __str__(self) -> str:
        return self.content


class AsyncClient:
    """`where`: an http(s) URL, or what `windlass run` takes: a path, a name from `windlass models`, a name on the hub.

    A local model is loaded with the first request, in its own process, which `close` (or the end of `async with`) ends.
    """

    def __init__(self, where: str | Path | CoreClient, **options: Unpack[ClientOptions]) -> None:
        self._client, self._default = open_core_client(where, options)

    async def chat(self, messages: Chat, *, system: str | None = None, **generation: Unpack[GenerationOptions]) -> Answer:
        return await _collect(self._client, chat_request(messages, system, generation, self._default))

    async def complete(self, prompt: str | Sequence[int], **generation: Unpack[GenerationOptions]) -> Answer:
        """Continues a text, or token ids, without a chat template."""
        return await _collect(self._client, prompt_request(prompt, generation, self._default))

    async def stream(
        self, messages: Chat, *, system: str | None = None, **generation: Unpack[GenerationOptions]
    ) -> AsyncGenerator[str]:
        """Streams the text of the answer; `deltas` has reasoning, tool calls and the rest too."""
        found = self._client.generate(chat_request(messages, system, generation, self._default))
        try:
            async for delta in found:
                if delta.content:
                    yield delta.content
        finally:
            await found.aclose()

    def deltas(
        self, messages: Chat, *, system: str | None = None, **generation: Unpack[GenerationOptions]
    ) -> AsyncGenerator[Delta]:
        return self._client.generate(chat_request(messages, system, generation, self._default))

    async def score(self, text: str | Sequence[int], *, start: int = 0, top: int = 0) -> Scores:
        """Log-probability of every token of a text."""
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
    """The blocking version of AsyncClient. Thread-safe."""

    def __init__(self, where: str | Path | CoreClient, **options: Unpack[ClientOptions]) -> None:
        client, self._default = open_core_client(where, options)
        self._client = SyncClient(client)

    def chat(self, messages: Chat, *, system: str | None = None, **generation: Unpack[GenerationOptions]) -> Answer:
        return answer_of(self._client.generate(chat_request(messages, system, generation, self._default)))

    def complete(self, prompt: str | Sequence[int], **generation: Unpack[GenerationOptions]) -> Answer:
        """Continues a text, or token ids, without a chat template."""
        return answer_of(self._client.generate(prompt_request(prompt, generation, self._default)))

    def stream(self, messages: Chat, *, system: str | None = None, **generation: Unpack[GenerationOptions]) -> Generator[str]:
        """Streams the text of the answer; `deltas` has reasoning, tool calls and the rest too."""
        found = self._client.generate(chat_request(messages, system, generation, self._default))
        try:
            for delta in found:
                if delta.content:
                    yield delta.content
        finally:
            found.close()

    def deltas(self, messages: Chat, *, system: str | None = None, **generation: Unpack[GenerationOptions]) -> Generator[Delta]:
        return self._client.generate(chat_request(messages, system, generation, self._default))

    def score(self, text: str | Sequence[int], *, start: int = 0, top: int = 0) -> Scores:
        """Log-probability of every token of a text."""
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


def chat_request(messages: Chat, system: str | None, generation: GenerationOptions, default: Sampling) -> Request:
    given: Sequence[Mapping[str, Any]] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if system is not None:
        given = [{"role": "system", "content": system}, *given]
    return Request(messages=from_messages(to_messages(given)), **_fields(generation, default))


def prompt_request(prompt: str | Sequence[int], generation: GenerationOptions, default: Sampling) -> Request:
    return Request(**_text_or_ids(prompt), **_fields(generation, default))


def score_request(text: str | Sequence[int], start: int, top: int) -> ScoreRequest:
    return ScoreRequest(**_text_or_ids(text), start=start, top=top)


def _text_or_ids(text: str | Sequence[int]) -> dict[str, Any]:
    return {"prompt": text} if isinstance(text, str) else {"token_ids": tuple(text)}


def _fields(generation: GenerationOptions, default: Sampling) -> dict[str, Any]:
    unknown = generation.keys() - GenerationOptions.__annotations__.keys()
    if unknown:
        raise UnknownName("argument", min(unknown), GenerationOptions.__annotations__)
    sampling = {name: value for name, value in generation.items() if name in _SAMPLING}
    fields: dict[str, Any] = {name: value for name, value in generation.items() if name not in _SAMPLING}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    if fields.get("tools"):
        fields["tools"] = msgspec.to_builtins(to_tools(fields["tools"]))
    for name in fields.keys() & _TUPLES:
        fields[name] = tuple(fields[name])
    return {"sampling": msgspec.structs.replace(default, **sampling), **fields}


# --- answers ---------------------------------------------------------------------------------------------------------


async def _collect(client: CoreClient, request: Request) -> Answer:
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

_SERVER_OPTIONS = frozenset({"api_key", "model", "timeout"})
_LAUNCH_OPTIONS = (
    "device", "kv", "exact", "deterministic", "quant", "context_tokens", "max_sequences", "disk_folder", "secret_file", "sync", "speculate",
)  # fmt: skip


def open_core_client(where: str | Path | CoreClient, options: ClientOptions) -> tuple[CoreClient, Sampling]:
    """The client, and its default sampling."""
    unknown = options.keys() - ClientOptions.__annotations__.keys()
    if unknown:
        raise UnknownName("argument", min(unknown), ClientOptions.__annotations__)
    if isinstance(where, Path):
        return _local(str(where), options)
    if not isinstance(where, str):
        _refuse(options.keys(), "opening a model or a server, not for an existing client")
        return where, Sampling()
    if not where.startswith(("http://", "https://")):
        return _local(where, options)
    _refuse(options.keys() - _SERVER_OPTIONS - {"progress"}, "a model on this machine, not for a server")
    from windlass.wire.client.http_client import HttpClient

    given: dict[str, Any] = {name: value for name, value in options.items() if name in _SERVER_OPTIONS}
    return HttpClient(where, **given), Sampling()


def _local(name: str, options: ClientOptions) -> tuple[CoreClient, Sampling]:
    """The same names and defaults as `windlass run`."""
    _refuse(options.keys() & _SERVER_OPTIONS, "a server, not for a model on this machine")
    from windlass.open.client import open_client, require_torch
    from windlass.open.compile import compile_kernels
    from windlass.open.generation import DEFAULTS, generation_defaults
    from windlass.open.resolve import runnable_files
    from windlass.runtime.machine.folders import ensure_home

    require_torch("running a model")
    ensure_home()
    shown = options.get("progress", False)
    launch = _launch(options)
    path = runnable_files(name, shown)
    compile_kernels(shown, launch.device)
    launch = msgspec.structs.replace(launch, model=str(path))
    return open_client(launch), Sampling(**(DEFAULTS | generation_defaults(path)))


def _launch(options: ClientOptions) -> Launch:
    given: dict[str, Any] = {name: value for name, value in options.items() if name in _LAUNCH_OPTIONS}
    layout = Layout(tp=options.get("tp", 1), pp=options.get("pp", 1), ep=options.get("ep", 1))
    workers = options.get("workers", ())
    memory = options.get("host_memory")
    launch = Launch(
        **given,
        host_memory=parse_bytes(memory) if isinstance(memory, str) else memory,
        layout=layout,
        workers=parse_workers(workers) if isinstance(workers, str) else tuple(workers),
    )
    check_launch(launch)
    return launch


def _refuse(names: Iterable[str], what: str) -> None:
    for name in sorted(names):
        raise BadInput(f"{name} is for {what}; leave it out")
