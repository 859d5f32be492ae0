"""Jobs of the other APIs: OpenAI's Responses, Anthropic's Messages, Ollama's. Each is a translation to a chat and back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from windlass.core.request import Delta
from windlass.tasks.serve.api.adapters import GenerationJob, ResponseWriter, chat_requests, completion_requests
from windlass.tasks.serve.api.caller import Caller
from windlass.tasks.serve.api.schema_notes import unenforced_header
from windlass.tasks.serve.http import errors
from windlass.tasks.serve.http.asgi import Header
from windlass.tasks.serve.service import Service
from windlass.wire.anthropic import request as anthropic
from windlass.wire.anthropic.schema import MessagesRequest
from windlass.wire.anthropic.writer import MessageBuilder
from windlass.wire.decode import decode
from windlass.wire.ollama import request as ollama
from windlass.wire.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from windlass.wire.ollama.writer import NDJSON, LineWriter
from windlass.wire.responses import request as responses
from windlass.wire.responses.schema import InputItem, ResponsesRequest
from windlass.wire.responses.writer import ResponseBuilder
from windlass.wire.schema.chat import ChatRequest
from windlass.wire.schema.errors import ApiError, renamed

_encode = msgspec.json.Encoder().encode


def responses_job(service: Service, raw: bytes, caller: Caller) -> GenerationJob:
    body = decode(raw, ResponsesRequest)
    adapter = service.check_model(body.model)
    earlier = _earlier(service, body, caller)
    with renaming(responses.PARAMS):
        chat = responses.responses_to_chat(body, msgspec.convert(earlier, list[InputItem]))
        job = chat_requests(service, chat, caller, adapter)
    builder = ResponseBuilder(body, service.shown_model(adapter))

    def whole(choices: Sequence[Sequence[Delta]]) -> bytes:
        _add_all(builder.event, choices)
        return _encode(builder.response)

    def finished(choices: Sequence[Sequence[Delta]]) -> None:
        if body.store is not False:
            items = [*earlier, *map(msgspec.to_builtins, responses.input_items(body))]
            service.responses.put(caller.share, builder.response, items)

    return msgspec.structs.replace(job, writer=_writer(body.stream, builder, whole), finished=finished, params=responses.PARAMS)


def responses_chat(service: Service, body: ResponsesRequest, caller: Caller) -> ChatRequest:
    """The chat that a response would be made of."""
    earlier = msgspec.convert(_earlier(service, body, caller), list[InputItem])
    with renaming(responses.PARAMS):
        return responses.responses_to_chat(body, earlier)


def _earlier(service: Service, body: ResponsesRequest, caller: Caller) -> list[dict[str, Any]]:
    """The items of the response that is continued, its output included."""
    if body.previous_response_id is None:
        return []
    stored = service.responses.get(caller.share, body.previous_response_id)
    if stored is None:
        raise errors.unknown_response("previous_response_id")
    items: list[dict[str, Any]] = msgspec.json.decode(stored.items)
    return [*items, *msgspec.json.decode(stored.response)["output"]]


def messages_job(service: Service, raw: bytes, caller: Caller) -> GenerationJob:
    body = decode(raw, MessagesRequest)
    adapter = service.check_model(body.model)
    can_switch = _can_switch_thinking(service)
    with renaming(anthropic.PARAMS):
        job = chat_requests(service, anthropic.messages_to_chat(body, can_switch), caller, adapter)
    builder = MessageBuilder(service.shown_model(adapter), body.stop_sequences or ())

    def whole(choices: Sequence[Sequence[Delta]]) -> bytes:
        _add_all(builder.event, choices)
        return _encode(builder.message())

    job = _with_unenforced(job, anthropic.unenforced(body, can_switch))
    return msgspec.structs.replace(job, writer=_writer(body.stream, builder, whole), params=anthropic.PARAMS)


def _can_switch_thinking(service: Service) -> bool:
    """Anthropic's clients ask every model to think, or not to; one whose template cannot be told answers as it does."""
    describe = getattr(service.client, "tokenizer_info", None)
    template: Any = None if describe is None else describe().get("chat_template")
    return not isinstance(template, str) or "thinking" in template


def ollama_chat_job(service: Service, raw: bytes, caller: Caller) -> GenerationJob:
    body = decode(raw, OllamaChatRequest)
    adapter = check_ollama_model(service, body.model)
    with renaming(ollama.PARAMS):
        job = chat_requests(service, ollama.ollama_to_chat(body, service.info.context_tokens), caller, adapter)
    return _ollama_job(service, body, job, is_chat=True)


def ollama_generate_job(service: Service, raw: bytes, caller: Caller) -> GenerationJob:
    body = decode(raw, OllamaGenerateRequest)
    adapter = check_ollama_model(service, body.model)
    context = service.info.context_tokens
    with renaming(ollama.PARAMS):
        if body.raw:
            job = _raw_job(service, body, caller, adapter)
        else:
            job = chat_requests(service, ollama.generate_to_chat(body, context), caller, adapter)
    return _ollama_job(service, body, job, is_chat=False)


def _raw_job(service: Service, body: OllamaGenerateRequest, caller: Caller, adapter: str) -> GenerationJob:
    """Without a limit unless one is given; OpenAI's completions have one."""
    completion = ollama.generate_to_completion(body, service.info.context_tokens)
    job = completion_requests(service, completion, caller, adapter)
    requests = [msgspec.structs.replace(request, max_tokens=completion.max_tokens) for request in job.requests]
    return msgspec.structs.replace(job, requests=requests)


def _ollama_job(service: Service, body: OllamaRequest, job: GenerationJob, is_chat: bool) -> GenerationJob:
    lines = LineWriter(body.model or service.model, is_chat)
    job = _with_unenforced(job, ollama.unenforced(body))

    async def writer() -> ResponseWriter:
        return ResponseWriter(lines if body.stream is not False else None, lambda choices: lines.whole(list(choices[0])))

    return msgspec.structs.replace(job, writer=writer, media_type=NDJSON, params=ollama.PARAMS)


def check_ollama_model(service: Service, name: str) -> str:
    """Names may have a tag. Returns the adapter."""
    return service.check_model(name.removesuffix(":latest"))


def _writer(stream: bool | None, events: Any, whole: Callable[[Sequence[Sequence[Delta]]], bytes]) -> Any:
    async def writer() -> ResponseWriter:
        return ResponseWriter(events if stream else None, whole)

    return writer


def _add_all(event: Callable[[int, Delta], bytes], choices: Sequence[Sequence[Delta]]) -> None:
    for delta in choices[0]:
        event(0, delta)


def _with_unenforced(job: GenerationJob, names: Sequence[str]) -> GenerationJob:
    """Adds parameters that have no effect to the header that names them."""
    if not names:
        return job
    own: list[Header] = [header for header in job.headers if header[0] == unenforced_header(())[0]]
    there = [name for header in own for name in header[1].decode().split(",")]
    rest = tuple(header for header in job.headers if header not in own)
    return msgspec.structs.replace(job, headers=(*rest, unenforced_header([*there, *names])))


@contextmanager
def renaming(params: Mapping[str, str]) -> Generator[None]:
    """Errors name the parameters of this API instead of a chat's."""
    try:
        yield
    except ApiError as refusal:
        raise renamed(refusal, params) from None


def chat_of_count(body: Any) -> ChatRequest:
    """For counting: the messages and tools of a chat."""
    return ChatRequest(model=body.model, messages=anthropic.chat_messages(body), tools=anthropic.chat_tools(body))
