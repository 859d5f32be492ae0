"""Core Requests -> request bodies.

Sampling parameters are always sent, whatever the server's defaults. Extensions are sent if the request needs them, or if the server
is known to accept them (`extensions`: ours and vLLM's).
"""

from __future__ import annotations

from typing import Any

import msgspec

from windlass.core.request import Constraint, Request, Sampling, ScoreRequest
from windlass.wire.messages import CHOICES, to_messages, to_tools
from windlass.wire.schema.chat import ChatRequest, JsonSchema, ResponseFormat, TemplateVariables, ToolChoice, ToolChoiceFunction
from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.sampling import StreamOptions, StructuredOutputs

DEFAULTS: dict[str, Any] = msgspec.structs.asdict(Sampling())
ALWAYS = frozenset(("temperature", "top_p"))
ALWAYS_KNOWN = ALWAYS | {"min_p", "repetition_penalty"}
"""Parameters that are sent even if they have their default; more of them to servers that know them."""


def request_to_chat(request: Request, model: str, *, stream: bool = True, extensions: bool = False) -> ChatRequest:
    assert request.messages is not None
    choice = request.tool_choice
    return ChatRequest(
        messages=to_messages(request.messages),
        tools=to_tools(request.tools) or None,
        tool_choice=_choice(choice) if request.tools or choice != "auto" else None,
        logprobs=True if request.logprobs is not None else None,
        top_logprobs=request.logprobs,
        chat_template_kwargs=None if request.thinking is None else TemplateVariables(enable_thinking=request.thinking),
        reasoning_effort=request.reasoning_effort,  # type: ignore[arg-type]
        parallel_tool_calls=request.parallel_tool_calls,
        continue_final_message=_continues(request),
        add_generation_prompt=False if request.continues_answer else None,
        **_common(request, model, stream, extensions),
    )


def request_to_completion(request: Request, model: str, *, stream: bool = True, extensions: bool = False) -> CompletionRequest:
    return CompletionRequest(
        prompt=_prompt(request),
        logprobs=request.logprobs,
        **_common(request, model, stream, extensions),
    )


def request_to_echo(request: Request, model: str, *, extensions: bool = False) -> CompletionRequest:
    """With the prompt's log-probabilities; not streamed."""
    body = request_to_completion(request, model, stream=False, extensions=extensions)
    return msgspec.structs.replace(body, echo=True, logprobs=max(request.prompt_logprobs or 0, request.logprobs or 0))


def score_to_completion(request: ScoreRequest, model: str) -> CompletionRequest:
    return CompletionRequest(
        model=model, prompt=_prompt(request), max_tokens=0, temperature=0.0, echo=True, logprobs=request.top,
        cache_salt=request.cache_salt or None,
    )  # fmt: skip


def _prompt(request: Request | ScoreRequest) -> Any:
    return list(request.token_ids) if request.token_ids is not None else request.prompt


def _choice(choice: str) -> str | ToolChoice:
    return choice if choice in CHOICES else ToolChoice(function=ToolChoiceFunction(name=choice), type="function")


def _continues(request: Request) -> bool | None:
    """Said only where it could be taken otherwise."""
    is_answer = bool(request.messages) and (request.messages or ({},))[-1].get("role") == "assistant"
    return request.continues_answer if is_answer else None


def _common(request: Request, model: str, stream: bool, extensions: bool) -> dict[str, Any]:
    return {
        "model": model,
        "stop": list(request.stop) or None,
        "max_tokens": request.max_tokens,
        "stream": stream or None,
        "stream_options": StreamOptions(include_usage=True) if stream else None,
        "stop_token_ids": list(request.stop_token_ids) or None,
        "min_tokens": request.min_tokens or None,
        "ignore_eos": request.ignore_eos or None,
        "cache_salt": request.cache_salt or None,
        "timeout": request.deadline_seconds if extensions else None,
        "return_token_ids": True if extensions else None,
        **_sampling(request.sampling, extensions),
        **_constraint(request.constraint),
    }


def _sampling(sampling: Sampling, extensions: bool) -> dict[str, Any]:
    always = ALWAYS_KNOWN if extensions else ALWAYS
    found: dict[str, Any] = {
        name: value for name, default in DEFAULTS.items() if (value := getattr(sampling, name)) != default or name in always
    }
    return found | ({"top_k": -1} if extensions and sampling.top_k is None else {})


def _constraint(constraint: Constraint | None) -> dict[str, Any]:
    match constraint:
        case None:
            return {}
        case Constraint(kind="json_object"):
            return {"response_format": ResponseFormat(type="json_object")}
        case Constraint(kind="json_schema", value=value):
            schema = JsonSchema(name="answer", schema=msgspec.json.decode(value), strict=constraint.is_strict)
            return {"response_format": ResponseFormat(type="json_schema", json_schema=schema)}
        case Constraint(kind="choice"):
            return {"structured_outputs": StructuredOutputs(choice=list(constraint.choices))}
        case Constraint(kind="regex", value=value):
            return {"structured_outputs": StructuredOutputs(regex=value)}
        case Constraint(value=value):
            return {"structured_outputs": StructuredOutputs(grammar=value)}
