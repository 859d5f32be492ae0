"""The engine as a Client: text in and out, tokens to an engine in a process of its own. No torch is imported here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.core.client import Late
from windlass.core.launch import Launch, RankJob
from windlass.core.request import (
    Delta,
    Embedding,
    EmbedRequest,
    Info,
    Request,
    ScoreRequest,
    Scores,
    Timings,
    TokenLogprob,
    Usage,
)
from windlass.errors import BadInput
from windlass.model.text.isolated.pool import IsolatedPool
from windlass.model.text.isolated.process import Vocabulary
from windlass.model.text.parse.stream import TextStream, joined_pieces
from windlass.model.text.tokenize.tokenizer import LONG_CHARACTERS
from windlass.runtime.engine.client.background import CHARACTERS_PER_VALUE, BackgroundPool, size_of
from windlass.runtime.engine.client.replay import MAX_CRASHES
from windlass.runtime.engine.client.requests import EngineRequests, Progress
from windlass.runtime.engine.client.text_processor import EncodedRequest, NoText, TextProcessor, TokenOnlyProcessor
from windlass.runtime.engine.client.transport import EngineTransport, ProcessTransport
from windlass.runtime.engine.protocol import (
    AddAdapter,
    Finish,
    PrefillStats,
    RemoveAdapter,
    SequenceOutput,
    Submit,
    finish_error,
    timeout_message,
)
from windlass.runtime.engine.timeline import mark

if TYPE_CHECKING:
    from windlass.runtime.weights.text.files import ModelText


class EngineClient:
    """A Client over any EngineTransport."""

    def __init__(
        self,
        make_transport: Callable[[], EngineTransport],
        text: ModelText | None = None,
        progress: Progress | None = None,
        max_crashes: int = 0,
    ) -> None:
        """`max_crashes`: engine crashes that a request survives before it fails."""
        self._text_processor = TokenOnlyProcessor() if text is None else TextProcessor(text)
        self._isolated = IsolatedPool(self._grammar_vocabulary)
        self._requests = EngineRequests(make_transport, progress, self._text_processor.vocabulary, max_crashes)
        self._background = BackgroundPool()

    @property
    def is_alive(self) -> bool:
        """Whether an engine is ready or moving; if not, the next request starts one."""
        return self._requests.is_alive

    @property
    def is_moving(self) -> bool:
        """Whether requests wait for an engine that is being restarted on other machines."""
        return self._requests.is_moving

    async def ready(self) -> Info:
        """Loads the model now instead of with the first request."""
        return await self.info()

    async def restart(self) -> None:
        """For a stuck engine: kills its process; another one continues its requests."""
        await self._requests.restart()

    async def unload(self) -> None:
        """Gives back the engine's memory; the next request loads it again."""
        await self._requests.unload()

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        began = time.monotonic()
        encoded = await self._encode(request)
        submit = await self._submit(request, encoded, began)
        builder = _DeltaBuilder(encoded.stream, len(encoded.tokens))
        async with aclosing(self._requests.outputs(submit)) as batches:
            async for outputs in batches:
                delta, finish = builder.add(outputs)
                yield await self._with_text(delta)
                if finish is not None:
                    return
                if builder.is_stopped:
                    break
        yield builder.stopped()  # by a stop string, which the engine does not know

    async def score(self, request: ScoreRequest) -> Scores:
        size = len(request.prompt or request.token_ids or ())
        context = await self._context(request, size)
        tokens = await self._background.run(lambda: self._text_processor.prompt_tokens(request, context), size)
        submit = Submit(
            id=0,
            token_ids=tokens,
            max_tokens=0,
            prompt_logprobs=request.top,
            prompt_logprobs_start=request.start,
            cache_salt=request.cache_salt,
            deadline_seconds=request.deadline_seconds,
            owner=request.owner,
        )
        found: list[TokenLogprob | None] = []
        async with aclosing(self._requests.outputs(submit)) as batches:
            async for outputs in batches:
                for output in outputs:
                    _check(output.finish)
                    found = output.prompt_logprobs if output.prompt_logprobs is not None else found
        return Scores(token_ids=tuple(tokens), logprobs=await self._prompt_with_text(found))

    async def embed(self, request: EmbedRequest) -> Embedding:
        size = len(request.prompt or request.token_ids or ())
        context = await self._context(request, size)
        given = ScoreRequest(prompt=request.prompt, token_ids=request.token_ids)
        tokens = await self._background.run(lambda: self._text_processor.prompt_tokens(given, context), size)
        submit = Submit(
            id=0, token_ids=tokens, pooling=request.pooling, deadline_seconds=request.deadline_seconds, owner=request.owner
        )
        vector: list[float] = []
        async with aclosing(self._requests.outputs(submit)) as batches:
            async for outputs in batches:
                _check(outputs[-1].finish)
                vector = next((output.embedding for output in outputs if output.embedding is not None), vector)
        return Embedding(vector=tuple(vector), num_tokens=len(tokens))

    def tokenizer_info(self) -> dict[str, Any]:
        """Special tokens and the chat template, for clients that render chats themselves."""
        return self._text_processor.describe()

    async def info(self) -> Info:
        if self._text_processor.has_chat:
            self._isolated.start()  # while the model is loaded
        found = await self._requests.info()
        has_text = isinstance(self._text_processor, TextProcessor)
        return msgspec.structs.replace(
            found,
            has_text=has_text,
            has_chat=self._text_processor.has_chat,
            tools=self._text_processor.tools,
            stop_token_ids=self._stops(found.stop_token_ids),
        )

    async def tokenize(
        self,
        text: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        special: bool = True,
        owner: str = "",
    ) -> list[int]:
        """A text as a prompt, or messages through the chat template. Needs no engine. `special`: with a prompt's special tokens."""
        if isinstance(text, str) and not special:
            return await self._background.run(lambda: self._text_processor.plain_tokens(text), len(text))
        if isinstance(text, str):
            return await self._background.run(lambda: self._text_processor.prompt_tokens(Request(prompt=text)), len(text))
        rendered = await self._render(Request(messages=tuple(map(dict, text)), tools=tuple(map(dict, tools)), owner=owner), None)
        return await self._background.run(lambda: self._text_processor.plain_tokens(rendered), len(rendered))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._background.run(lambda: self._text_processor.decode(token_ids), len(token_ids))

    async def close(self) -> None:
        self._background.close()
        self._isolated.close()
        await self._requests.close()

    # --- requests to tokens

    async def _encode(self, request: Request) -> EncodedRequest:
        """What others wrote (a template, a schema, a grammar) is tried in processes of their own before anything else depends on it."""
        try:
            async with asyncio.timeout(request.deadline_seconds):
                encoded = await self._encode_text(request)
                if not encoded.grammar:
                    return encoded
                return encoded._replace(is_slow_grammar=await self._isolated.check_grammar(encoded.grammar, request.owner))
        except TimeoutError:
            raise Late(timeout_message(request.deadline_seconds)) from None

    async def _encode_text(self, request: Request) -> EncodedRequest:
        size = _size(request)
        context = await self._context(request, size)
        rendered = ""
        if request.messages is not None:
            rendered = await self._render(request, context)
            size = max(size, len(rendered))
            context = await self._context(request, size)
        return await self._background.run(lambda: self._text_processor.encode_request(request, context, rendered), size)

    async def _render(self, request: Request, context: int | None) -> str:
        *others, last = self._text_processor.chat_texts(request, context)
        for text in others:
            with suppress(BadInput):
                return await self._isolated.render(text.template, text.values, request.owner)
        return await self._isolated.render(last.template, last.values, request.owner)

    def _grammar_vocabulary(self) -> Vocabulary:
        found = self._text_processor.vocabulary()
        return Vocabulary(found.tokenizer_json, found.stop_token_ids)

    async def _context(self, request: Request | ScoreRequest | EmbedRequest, size: int) -> int | None:
        """Long input is checked against the context before it is tokenized; short input need not wait for an engine."""
        if size < LONG_CHARACTERS:
            return None
        return (await self._ready(request.deadline_seconds)).context_tokens

    async def _submit(self, request: Request, encoded: EncodedRequest, began: float) -> Submit:
        info = await self._ready(request.deadline_seconds)
        self._check_stops(request.stop_token_ids, info)
        eos = self._stops(info.stop_token_ids)
        left = None if request.deadline_seconds is None else max(request.deadline_seconds - (time.monotonic() - began), 0.001)
        return Submit(
            id=0,
            token_ids=encoded.tokens,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=list(dict.fromkeys((*request.stop_token_ids, *(() if request.ignore_eos else eos)))),
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            prompt_logprobs_start=request.prompt_logprobs_start,
            cache_salt=request.cache_salt,
            grammar=encoded.grammar,
            is_slow_grammar=encoded.is_slow_grammar,
            deadline_seconds=left,
            owner=request.owner,
            priority=request.priority,
            adapter=request.adapter,
        )

    async def _ready(self, deadline_seconds: float | None) -> Info:
        """Time spent loading counts against the deadline."""
        info = self._requests.ready_info
        if info is not None:
            return info
        try:
            async with asyncio.timeout(deadline_seconds):
                return await self._requests.ready()
        except TimeoutError:
            raise Late(timeout_message(deadline_seconds)) from None

    def _check_stops(self, requested: tuple[int, ...], info: Info) -> None:
        """Of the request only: a model's own list may name tokens that it does not have."""
        known = min(self._text_processor.num_tokens, info.vocab_size or self._text_processor.num_tokens)
        if requested and max(requested) >= known:
            raise BadInput(
                f"stop_token_ids has token {max(requested)}; this model's tokens are 0 to {known - 1}", field="stop_token_ids"
            )

    def _stops(self, model_stops: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self._text_processor.stop_ids, *model_stops)))

    async def _with_text(self, delta: Delta) -> Delta:
        if not delta.logprobs and delta.prompt_logprobs is None:
            return delta
        prompt = None if delta.prompt_logprobs is None else await self._prompt_with_text(delta.prompt_logprobs)
        return msgspec.structs.replace(delta, logprobs=self._text_processor.with_text(delta.logprobs), prompt_logprobs=prompt)

    async def _prompt_with_text(self, found: Sequence[TokenLogprob | None]) -> tuple[TokenLogprob | None, ...]:
        def with_text() -> tuple[TokenLogprob | None, ...]:
            return tuple(None if entry is None else self._text_processor.with_text([entry])[0] for entry in found)

        return await self._background.run(
            with_text, CHARACTERS_PER_VALUE * sum(1 + len(entry.top) for entry in found if entry is not None)
        )


class _DeltaBuilder:
    """Turns the outputs of one request into deltas."""

    def __init__(self, stream: TextStream | NoText, num_prompt: int) -> None:
        self._stream, self._num_prompt = stream, num_prompt
        self._num_tokens = 0
        self._is_accepted = False
        self._prefill = PrefillStats(0, 0.0, 0.0)
        self._first = 0.0
        self.is_stopped = False

    def add(self, outputs: list[SequenceOutput]) -> tuple[Delta, Finish | None]:
        """One delta for all outputs that have arrived; `finish` with the last one."""
        output = outputs[0] if len(outputs) == 1 else _joined(outputs)
        tokens, finish, prompt = output.token_ids, output.finish, output.prompt_logprobs
        _check(finish)
        self._num_tokens += len(tokens)
        self._note_prefill(output.prefill)
        stop_token = None if finish is None else finish.stop_token_id
        piece = self._stream.push(tokens if stop_token is None else tokens[:-1])
        self.is_stopped = piece.stopped
        if finish is not None and not piece.stopped:
            piece = joined_pieces(piece, self._stream.finish())
        delta = Delta(
            content=piece.content,
            reasoning=piece.reasoning,
            tool_calls=piece.tool_calls,
            call_pieces=piece.call_pieces,
            token_ids=tuple(tokens),
            logprobs=tuple(output.logprobs),
            prompt_logprobs=None if prompt is None else tuple(prompt),
        )
        if finish is None:
            return self._with_acceptance(delta), None
        return _with_finish(delta, finish, piece.stopped, self._stream.num_reasoning_tokens), finish

    def _with_acceptance(self, delta: Delta) -> Delta:
        """The engine's first output of a request says that it was accepted, before it has any tokens."""
        if self._is_accepted or delta.token_ids:
            return delta
        self._is_accepted = True
        return msgspec.structs.replace(delta, usage=Usage(prompt_tokens=self._num_prompt, completion_tokens=0))

    def stopped(self) -> Delta:
        """The last delta. What the engine still computes before it is cancelled is not counted."""
        usage = Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=self._num_tokens,
            cached_tokens=self._prefill.cached_tokens,
            reasoning_tokens=self._stream.num_reasoning_tokens,
        )
        timings = Timings(
            queue_seconds=self._prefill.queue_seconds,
            prefill_seconds=self._prefill.prefill_seconds,
            decode_seconds=time.perf_counter() - self._first,
        )
        return Delta(finish_reason="stop", usage=usage, timings=timings)

    def _note_prefill(self, prefill: PrefillStats | None) -> None:
        if prefill is not None:
            self._prefill, self._first = prefill, time.perf_counter()


def _joined(outputs: list[SequenceOutput]) -> SequenceOutput:
    """Of several steps: its reader was slower than the engine."""
    return SequenceOutput(
        id=outputs[0].id,
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=[entry for output in outputs for entry in output.logprobs],
        prompt_logprobs=next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None),
        prefill=next((output.prefill for output in outputs if output.prefill is not None), None),
        finish=outputs[-1].finish,
    )


def _with_finish(delta: Delta, finish: Finish, by_string: bool, num_reasoning: int) -> Delta:
    return msgspec.structs.replace(
        delta,
        finish_reason="stop" if by_string else finish.reason,
        stop_token_id=None if by_string else finish.stop_token_id,
        usage=msgspec.structs.replace(finish.usage, reasoning_tokens=num_reasoning),
        timings=finish.timings,
    )


def _check(finish: Finish | None) -> None:
    if finish is not None and finish.reason == "error":
        raise finish_error(finish)


def _size(request: Request) -> int:
    """Cost of encoding the request, in characters; token ids count one each."""
    constraint = request.constraint.value if request.constraint is not None else ""
    given = len(request.prompt or request.token_ids or ())
    return given + len(constraint) + (0 if request.messages is None else size_of(request.messages, request.tools))


class LocalClient(EngineClient):
    """An engine in a process of its own: started with the first request, restarted after a crash.

    `progress` is called with bytes while the model is loaded.
    """

    def __init__(self, launch: Launch, text: ModelText | None = None, progress: Progress | None = None) -> None:
        super().__init__(lambda: ProcessTransport(RankJob(launch=self._launch)), text, progress, MAX_CRASHES)
        self._launch = launch

    async def add_adapter(self, name: str, folder: str) -> None:
        """Into the engine that runs, and into those that are started after it. Impossible: this engine has to be started with it."""
        await self._requests.change(lambda number: AddAdapter(number, name, folder))
        self._set_adapters((*self._launch.adapters, (name, folder)))  # nothing is awaited since the engine was there

    async def remove_adapter(self, name: str) -> None:
        """Returns when no request has it any more."""
        await self._requests.change(lambda number: RemoveAdapter(number, name))
        self._set_adapters(tuple(pair for pair in self._launch.adapters if pair[0] != name))

    def _set_adapters(self, adapters: tuple[tuple[str, str], ...]) -> None:
        self._launch = msgspec.structs.replace(self._launch, adapters=adapters)


def open_client(launch: Launch, progress: Progress | None = None, *, needs_text: bool = True) -> LocalClient:
    """A client for a path: the tokenizer is loaded here, the weights in the engine process. `needs_text`: fail without a tokenizer."""
    launch, text = with_text(launch, needs_text=needs_text)
    return LocalClient(launch, text, progress)


def with_text(launch: Launch, *, needs_text: bool = True) -> tuple[Launch, ModelText | None]:
    """The Launch with its vocabulary size filled in, and the model's tokenizer."""
    from windlass.runtime.weights.text.files import model_text

    if launch.random_weights is not None:
        return launch, None
    try:
        text = model_text(Path(launch.model))
    except BadInput:
        if needs_text:
            raise
        return launch, None
    mark("tokenizer loaded")
    return launch if launch.num_tokens else msgspec.structs.replace(launch, num_tokens=max(text.tokenizer.known_ids) + 1), text
