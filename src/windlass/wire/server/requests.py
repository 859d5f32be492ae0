"""Bodies <-> core Requests. Whatever a body asks for is in the Request or is refused by its name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.core.request import NO_EFFORT, Constraint, ConstraintKind, Request, Sampling
from windlass.errors import BadInput, TooLong
from windlass.wire.messages import CHOICES, from_messages, from_tools
from windlass.wire.schema.chat import ChatRequest, NamedTool, ResponseFormat
from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import Refusal, invalid, unsupported
from windlass.wire.schema.sampling import CommonRequest, StructuredOutputs
from windlass.wire.server.unsupported import check_refused

TOO_LONG = "context_length_exceeded"
COMPLETION_TOKENS = 16
"""What OpenAI's API gives to a completion that does not say max_tokens. A chat goes on until its end."""


class Limits(Frozen):
    """What a server allows, and what it takes where a request says nothing."""

    max_n: int = 16
    max_choices: int = 256
    """Of one completion request: prompts times answers."""
    context_tokens: int | None = None
    """What cannot fit in it, however short its messages are, is refused before it is looked at."""
    max_top_logprobs: int = 20
    deadline_seconds: float | None = None
    """Of requests that do not say `timeout`, and the most they may say."""
    sampling: Sampling = Sampling()
    """Of requests that leave things out: the API's defaults, or the model's own."""


ANY = Limits()


def chat_to_request(body: ChatRequest, limits: Limits = ANY) -> Request:
    """One of its `n` answers; see `copies`."""
    check_refused(body)
    _check_fits("messages", len(body.messages), limits)
    _check_fits("tools", len(body.tools or ()), limits)
    tools = from_tools(body.tools or ())
    with named(body):
        return Request(
            messages=from_messages(body.messages),
            tools=tools,
            tool_choice=_tool_choice(body.tool_choice),
            thinking=_thinking(body),
            reasoning_effort=body.reasoning_effort,
            max_tokens=_max_tokens(body),
            logprobs=_chat_logprobs(body, limits),
            **_common(body, body.response_format, limits),
        )


def completion_to_requests(body: CompletionRequest, limits: Limits = ANY) -> list[Request]:
    """One per choice, in the order of their index: `n` of the first prompt, `n` of the second."""
    check_refused(body)
    prompts = prompts_of(body, limits)
    _check_top("logprobs", body.logprobs, limits)
    with named(body):
        requests = [
            Request(
                **prompt,
                max_tokens=COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
                **_common(body, body.response_format, limits),
            )
            for prompt in prompts
        ]
    return [copy for request in requests for copy in copies(request, body.n or 1)]


def copies(request: Request, n: int) -> list[Request]:
    """A seed is the first one's; the others count on from it, for the same answer n times would be no choice."""
    seed = request.sampling.seed
    if seed is None:
        return [request] * n
    seeds = (seed + number if seed + number < 2**64 else seed - number for number in range(n))
    return [msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=one)) for one in seeds]


def prompts_of(body: CompletionRequest, limits: Limits) -> list[dict[str, Any]]:
    """As a Request's `prompt` or `token_ids`."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    kinds = {type(entry) for entry in prompt}
    if len(kinds) != 1:
        raise invalid("prompt", "is empty" if not kinds else "mixes texts and tokens; give one kind")
    if kinds == {int}:
        _check_fits("prompt", len(prompt), limits)
        return [{"token_ids": tuple(prompt)}]
    _check_choices(len(prompt), body.n or 1, limits.max_choices)
    if kinds == {str}:
        return [{"prompt": text} for text in prompt]
    lists = [ids for ids in prompt if isinstance(ids, list)]
    _check_fits("prompt", max(map(len, lists)), limits)
    return [{"token_ids": tuple(ids)} for ids in lists]


def _check_choices(num_prompts: int, n: int, most: int) -> None:
    if num_prompts > most:
        raise invalid("prompt", f"has {num_prompts} entries; at most {most} are taken at once")
    if num_prompts * n > most:
        raise invalid("n", f"is {n} for each of {num_prompts} prompts; at most {most} answers are given at once")


def _check_fits(param: str, count: int, limits: Limits) -> None:
    """Every entry takes a token at least."""
    if limits.context_tokens is not None and count > limits.context_tokens:
        message = f"{param} has {count:,} entries, which do not fit in {limits.context_tokens:,} tokens (the context)"
        raise Refusal(message, param=param, code=TOO_LONG)


# --- parts -----------------------------------------------------------------------------------------------------------


def _common(body: CommonRequest, response_format: ResponseFormat | None, limits: Limits) -> dict[str, Any]:
    if (body.n or 1) > limits.max_n:
        raise invalid("n", f"is {body.n}; at most {limits.max_n} answers are given at once")
    return {
        "sampling": sampling_of(body, limits.sampling),
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": bool(body.ignore_eos),
        "cache_salt": body.cache_salt or "",
        "constraint": _constraint(response_format, body.structured_outputs),
        "deadline_seconds": _deadline(body.timeout, limits.deadline_seconds),
    }


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed")


def sampling_of(body: CommonRequest, default: Sampling) -> Sampling:
    given = {name: value for name in _NUMBERS if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = body.top_k if body.top_k > 0 else None
    return msgspec.structs.replace(default, **given)


def _deadline(asked: float | None, longest: float | None) -> float | None:
    if asked is not None and longest is not None and asked > longest:
        raise invalid("timeout", f"is {asked:g} seconds; at most {longest:g} are given to a request")
    return longest if asked is None else asked


def _max_tokens(body: ChatRequest) -> int | None:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise invalid("max_tokens", f"is {older} and max_completion_tokens {newer}; they mean the same, so give one")
    return older if newer is None else newer


def _chat_logprobs(body: ChatRequest, limits: Limits) -> int | None:
    if not body.logprobs:
        if body.top_logprobs is not None:
            raise invalid("top_logprobs", "needs logprobs: true")
        return None
    _check_top("top_logprobs", body.top_logprobs, limits)
    return body.top_logprobs or 0


def _check_top(name: str, value: int | None, limits: Limits) -> None:
    if value is not None and value > limits.max_top_logprobs:
        raise invalid(name, f"is {value}; at most {limits.max_top_logprobs} are given")


def _tool_choice(choice: str | NamedTool | None) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise invalid(
                "tool_choice", f"is {choice[:40]!r}; it should be none, auto, required or an object that names a function"
            )
        return choice
    if choice.type != "function" or choice.function is None:
        raise unsupported("tool_choice.type", f"{choice.type[:40]!r} is not offered; name a function")
    return choice.function.name


def _thinking(body: ChatRequest) -> bool | None:
    variables = body.chat_template_kwargs
    wishes = {
        "chat_template_kwargs.enable_thinking": variables.enable_thinking if variables else None,
        "chat_template_kwargs.thinking": variables.thinking if variables else None,
    }
    said = {name: wish for name, wish in wishes.items() if wish is not None}
    effort = None if body.reasoning_effort is None else body.reasoning_effort not in NO_EFFORT
    if said and effort is not None and effort not in said.values():
        raise invalid("reasoning_effort", f"says otherwise than {next(iter(said))}; give one of them")
    if len(set(said.values())) > 1:
        raise invalid(list(said)[-1], f"says otherwise than {next(iter(said))}; give one of them")
    return next(iter(said.values()), None)


def _constraint(format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Constraint | None:
    of_format = None if format is None else _of_format(format)
    if outputs is None:
        return of_format
    if of_format is not None:
        raise invalid("structured_outputs", "and response_format both say what the answer must be; give one of them")
    return _of_outputs(outputs)


def _of_format(format: ResponseFormat) -> Constraint | None:
    given = {name for name in ("json_schema", "regex", "grammar") if getattr(format, name) is not None}
    wanted = {format.type} - {"text", "json_object"}
    if given != wanted:
        name = f"response_format.{next(iter(given ^ wanted))}"
        raise invalid(name, "is missing" if wanted - given else f"does not go with the type {format.type}")
    if format.type == "text":
        return None
    if format.json_schema is not None:
        if format.json_schema.schema is None:
            raise invalid("response_format.json_schema.schema", "is missing")
        return Constraint(kind="json_schema", value=_text(format.json_schema.schema))
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
    return Constraint(kind=kinds[name], value=value if isinstance(value, str) else _text(value))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


PARAMS: dict[str, tuple[str, ...]] = {
    "prompt": ("messages", "prompt"),
    "token_ids": ("prompt", "tokens"),
    "constraint": ("structured_outputs", "response_format"),
    "thinking": ("chat_template_kwargs", "reasoning_effort"),
    "max_tokens": ("max_completion_tokens", "max_tokens"),
    "logprobs": ("top_logprobs", "logprobs"),
    "prompt_logprobs": ("logprobs",),
    "deadline_seconds": ("timeout",),
}
"""Core's fields whose names are others in the API: the first that the body has is meant. All others have the same name."""


def param_of(field: str, body: object) -> str | None:
    """What the API calls a field of core's, in this body; None where it has none."""
    names = PARAMS.get(field, (field,))
    there = [name for name in names if hasattr(body, name)]
    return next((name for name in there if getattr(body, name) is not None), there[-1] if there else None)


def blamed(error: BadInput, body: object) -> Refusal:
    code = TOO_LONG if isinstance(error, TooLong) else "invalid_value"
    return Refusal(str(error), param=param_of(error.field, body), code=code)


@contextmanager
def named(body: object) -> Generator[None]:
    """Errors of core say which field is to blame; the Refusal says it in the API's words."""
    try:
        yield
    except Refusal:
        raise
    except BadInput as error:
        raise blamed(error, body) from None
