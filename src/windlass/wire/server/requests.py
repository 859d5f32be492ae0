"""Request bodies -> core Requests. Every parameter is either carried into the Request or rejected by name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.core.request import NO_EFFORT, Constraint, ConstraintKind, Request, Sampling, tool_name
from windlass.errors import BadInput, TooLong
from windlass.wire.messages import CHOICES, from_messages, from_tools
from windlass.wire.schema.chat import ChatRequest, ResponseFormat, ToolChoice
from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import ApiError, invalid, unsupported
from windlass.wire.schema.sampling import CommonRequest, StructuredOutputs
from windlass.wire.server.unsupported import check_unsupported

TOO_LONG = "context_length_exceeded"
COMPLETION_TOKENS = 16
"""OpenAI's default max_tokens of a text completion. Chats have none."""


class RequestLimits(Frozen):
    """A server's limits and defaults."""

    max_n: int = 16
    max_choices: int = 256
    """Sequences of one request: prompts times n."""
    context_tokens: int | None = None
    """Bodies with more entries than this are rejected before any further processing."""
    max_top_logprobs: int = 20
    deadline_seconds: float | None = None
    """Default and maximum of `timeout`."""
    sampling: Sampling = Sampling()
    """Defaults: the API's or the model's."""


ANY = RequestLimits()


def too_long_message(why: str, context_tokens: int) -> str:
    """Clients recognise the error by the words of its beginning."""
    return f"This model's maximum context length is {context_tokens} tokens. However, {why}"


def chat_to_request(body: ChatRequest, limits: RequestLimits = ANY) -> Request:
    """The request of one choice; see `expand_n`."""
    check_unsupported(body)
    check_fits("messages", len(body.messages), limits)
    check_fits("tools", len(body.tools or ()), limits)
    tools, choice = chosen_tools(body)
    with naming_params(body):
        return Request(
            messages=from_messages(body.messages),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
            continues_answer=_continues(body, choice),
            thinking=_thinking(body),
            reasoning_effort=body.reasoning_effort,
            max_tokens=_max_tokens(body),
            logprobs=_chat_logprobs(body, limits),
            **_common(body, body.response_format, limits),
        )


def completion_to_requests(body: CompletionRequest, limits: RequestLimits = ANY) -> list[Request]:
    """One per choice, ordered by index: `n` of the first prompt, then `n` of the second."""
    check_unsupported(body)
    prompts = prompts_of(body, limits)
    _check_top("logprobs", body.logprobs, limits)
    with naming_params(body):
        common = _common(body, body.response_format, limits)
        requests = [
            Request(
                **prompt,
                max_tokens=COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
                **common,
            )
            for prompt in prompts
        ]
    return [copy for request in requests for copy in expand_n(request, body.n or 1)]


def expand_n(request: Request, n: int) -> list[Request]:
    """With a seed, the copies use consecutive seeds: the same one would give n equal choices."""
    seed = request.sampling.seed
    if seed is None:
        return [request] * n
    seeds = (seed + number if seed + number < 2**64 else seed - number for number in range(n))
    return [msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=one)) for one in seeds]


def prompts_of(body: CompletionRequest, limits: RequestLimits) -> list[dict[str, Any]]:
    """As a Request's `prompt` or `token_ids`."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    kinds = {type(entry) for entry in prompt}
    if len(kinds) != 1:
        raise invalid("prompt", "is empty" if not kinds else "mixes strings and token ids; use one kind")
    if kinds == {int}:
        check_fits("prompt", len(prompt), limits)
        return [{"token_ids": tuple(prompt)}]
    _check_choices(len(prompt), body.n or 1, limits.max_choices)
    if kinds == {str}:
        return [{"prompt": text} for text in prompt]
    lists = [ids for ids in prompt if isinstance(ids, list)]
    check_fits("prompt", max(map(len, lists)), limits)
    return [{"token_ids": tuple(ids)} for ids in lists]


def _check_choices(num_prompts: int, n: int, most: int) -> None:
    if num_prompts > most:
        raise invalid("prompt", f"has {num_prompts} entries; at most {most} are allowed per request")
    if num_prompts * n > most:
        raise invalid("n", f"is {n} for each of {num_prompts} prompts; at most {most} choices are allowed per request")


def check_fits(param: str, count: int, limits: RequestLimits) -> None:
    """Every entry takes at least one token."""
    if limits.context_tokens is not None and count > limits.context_tokens:
        message = too_long_message(f"{param} has {count:,} entries, which do not fit", limits.context_tokens)
        raise ApiError(message, param=param, code=TOO_LONG)


# --- parts -----------------------------------------------------------------------------------------------------------


def _common(body: CommonRequest, response_format: ResponseFormat | None, limits: RequestLimits) -> dict[str, Any]:
    if (body.n or 1) > limits.max_n:
        raise invalid("n", f"is {body.n}; at most {limits.max_n} is allowed")
    return {
        "sampling": sampling_of(body, limits.sampling),
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": bool(body.ignore_eos),
        "cache_salt": body.cache_salt or "",
        "min_tokens": body.min_tokens or 0,
        "priority": body.priority or 0,
        "constraint": _constraint(response_format, body.structured_outputs),
        "deadline_seconds": _deadline(body.timeout, limits.deadline_seconds),
    }


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed")


def sampling_of(body: CommonRequest, default: Sampling) -> Sampling:
    given = {name: value for name in _NUMBERS if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = body.top_k if body.top_k > 0 else None
    return msgspec.structs.replace(default, **given) if given else default


def _deadline(asked: float | None, longest: float | None) -> float | None:
    if asked is not None and longest is not None and asked > longest:
        raise invalid("timeout", f"is {asked:g} seconds; at most {longest:g} are allowed")
    return longest if asked is None else asked


def _max_tokens(body: ChatRequest) -> int | None:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise invalid("max_tokens", f"is {older} and max_completion_tokens {newer}; they are aliases; give one")
    return older if newer is None else newer


def _chat_logprobs(body: ChatRequest, limits: RequestLimits) -> int | None:
    if not body.logprobs:
        if body.top_logprobs is not None:
            raise invalid("top_logprobs", "needs logprobs: true")
        return None
    _check_top("top_logprobs", body.top_logprobs, limits)
    return body.top_logprobs or 0


def _check_top(name: str, value: int | None, limits: RequestLimits) -> None:
    if value is not None and value > limits.max_top_logprobs:
        raise invalid(name, f"is {value}; at most {limits.max_top_logprobs} are returned")


def chosen_tools(body: ChatRequest) -> tuple[tuple[dict[str, Any], ...], str]:
    """The tools that the model is shown, and the core's `tool_choice`."""
    tools, choice = from_tools(body.tools or ()), body.tool_choice
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        return _allowed(tools, choice)
    return tools, _tool_choice(choice)


def _allowed(tools: tuple[dict[str, Any], ...], choice: ToolChoice) -> tuple[tuple[dict[str, Any], ...], str]:
    if choice.allowed_tools is None:
        raise invalid("tool_choice.allowed_tools", "is missing")
    names = {tool.function.name if tool.function is not None else tool.name for tool in choice.allowed_tools.tools}
    known = {tool_name(tool) for tool in tools}
    for name in names - known:
        raise invalid("tool_choice.allowed_tools.tools", f"names {str(name)[:64]!r}, which is not among the tools")
    return tuple(tool for tool in tools if tool_name(tool) in names), choice.allowed_tools.mode


def _tool_choice(choice: str | ToolChoice | None) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise invalid(
                "tool_choice", f"is {choice[:40]!r}; it should be none, auto, required or an object that names a function"
            )
        return choice
    if choice.type != "function" or choice.function is None:
        raise unsupported("tool_choice.type", f"{choice.type[:40]!r} is not supported; name a function")
    return choice.function.name


def _continues(body: ChatRequest, tool_choice: str) -> bool:
    """Whether the answer continues the last message. Without a word about it, one that can be continued is."""
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise unsupported("add_generation_prompt", "cannot be false without continue_final_message: there is always an answer")
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid("continue_final_message", "and add_generation_prompt contradict each other; set one of them to false")
    if body.continue_final_message is not None:
        return body.continue_final_message
    last = body.messages[-1]
    is_free = tool_choice in ("auto", "none") and body.structured_outputs is None
    is_text = body.response_format is None or body.response_format.type == "text"
    return last.role == "assistant" and bool(last.content) and not last.tool_calls and is_free and is_text


def _thinking(body: ChatRequest) -> bool | None:
    variables = body.chat_template_kwargs
    switches = {
        "chat_template_kwargs.enable_thinking": variables.enable_thinking if variables else None,
        "chat_template_kwargs.thinking": variables.thinking if variables else None,
    }
    given = {name: value for name, value in switches.items() if value is not None}
    effort = None if body.reasoning_effort is None else body.reasoning_effort not in NO_EFFORT
    if given and effort is not None and effort not in given.values():
        raise invalid("reasoning_effort", f"contradicts {next(iter(given))}; give one of them")
    if len(set(given.values())) > 1:
        raise invalid(list(given)[-1], f"contradicts {next(iter(given))}; give one of them")
    return next(iter(given.values()), None)


def _constraint(format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Constraint | None:
    of_format = None if format is None else _of_format(format)
    if outputs is None:
        return of_format
    if of_format is not None:
        raise invalid("structured_outputs", "and response_format both constrain the output; give one of them")
    return _of_outputs(outputs)


def _of_format(format: ResponseFormat) -> Constraint | None:
    given = {name for name in ("json_schema", "regex", "grammar") if getattr(format, name) is not None}
    expected = {format.type} - {"text", "json_object"}
    if given != expected:
        name = f"response_format.{next(iter(given ^ expected))}"
        raise invalid(name, "is missing" if expected - given else f"is not valid with the type {format.type}")
    if format.schema is not None and format.type != "json_object":
        raise invalid("response_format.schema", f"is not valid with the type {format.type}")
    if format.type == "text":
        return None
    if format.schema is not None:
        return Constraint(kind="json_schema", value=_text(format.schema))
    if format.json_schema is not None:
        if format.json_schema.schema is None:
            raise invalid("response_format.json_schema.schema", "is missing")
        return Constraint(kind="json_schema", value=_text(format.json_schema.schema), is_strict=bool(format.json_schema.strict))
    return Constraint(kind=format.type, value=format.regex or format.grammar or "")


def _of_outputs(outputs: StructuredOutputs) -> Constraint:
    given: dict[str, Any] = {
        name: value for name, value in msgspec.to_builtins(outputs).items() if value is not False or name == "json"
    }
    if len(given) != 1:
        raise invalid("structured_outputs", "should have exactly one of json, regex, choice, grammar and json_object")
    [(name, value)] = given.items()
    kinds: dict[str, ConstraintKind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    if name == "json_object":
        return Constraint(kind="json_object")
    return Constraint(kind=kinds[name], value=value if isinstance(value, str) else _text(value), is_strict=name != "json")


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


PARAMS: dict[str, tuple[str, ...]] = {
    "adapter": ("model",),
    "prompt": ("messages", "prompt"),
    "token_ids": ("prompt", "tokens"),
    "constraint": ("structured_outputs", "response_format", "tools"),
    "continues_answer": ("continue_final_message", "messages"),
    "thinking": ("chat_template_kwargs", "reasoning_effort"),
    "max_tokens": ("max_completion_tokens", "max_tokens"),
    "logprobs": ("top_logprobs", "logprobs"),
    "prompt_logprobs": ("logprobs",),
    "deadline_seconds": ("timeout",),
}
"""Core fields with different names in the API: the first one that the body sets is meant. All others have the same name."""


def param_of(field: str, body: object) -> str | None:
    """The API's name of a core field in this body; None if there is none."""
    names = PARAMS.get(field, (field,))
    there = [name for name in names if hasattr(body, name)]
    return next((name for name in there if getattr(body, name) is not None), there[-1] if there else None)


def bad_input_error(error: BadInput, body: object) -> ApiError:
    code = TOO_LONG if isinstance(error, TooLong) else "invalid_value"
    return ApiError(str(error), param=param_of(error.field, body), code=code)


@contextmanager
def naming_params(body: object) -> Generator[None]:
    """Turns core's BadInput, which names a core field, into an ApiError that names the API parameter."""
    try:
        yield
    except ApiError:
        raise
    except BadInput as error:
        raise bad_input_error(error, body) from None
