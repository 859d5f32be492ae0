"""Known parameters that are not supported: accepted with values that have no effect, otherwise rejected by name."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import invalid, unsupported
from windlass.wire.schema.sampling import CommonRequest


class UnsupportedRule(NamedTuple):
    harmless: tuple[Any, ...]
    """Values without effect; null always is one."""
    why: str


_GUIDED = UnsupportedRule((), "is deprecated; use structured_outputs or response_format")
_TEXT_ONLY = "is not supported: responses are text only"

UNSUPPORTED: dict[str, UnsupportedRule] = {
    # OpenAI's
    "audio": UnsupportedRule((), _TEXT_ONLY),
    "modalities": UnsupportedRule((["text"],), _TEXT_ONLY),
    "store": UnsupportedRule((False,), "is not supported: nothing is stored"),
    "prediction": UnsupportedRule((), "is not supported"),
    "web_search_options": UnsupportedRule((), "is not supported: there is no web search"),
    "moderation": UnsupportedRule((), "is not supported"),
    "functions": UnsupportedRule((), "is deprecated; use tools"),
    "function_call": UnsupportedRule((), "is deprecated; use tool_choice"),
    "prompt_cache_options": UnsupportedRule(
        (), "is not supported: common prefixes are cached automatically; use cache_salt to isolate them"
    ),
    "prompt_cache_retention": UnsupportedRule(("in_memory", "in-memory"), "is always in_memory"),
    "service_tier": UnsupportedRule(("auto", "default"), "is not supported: there is one tier"),
    "verbosity": UnsupportedRule(("medium",), "is not supported; put it into a message"),
    "suffix": UnsupportedRule(("",), "is not supported: no fill-in-the-middle"),
    # vLLM's and other servers'
    "skip_special_tokens": UnsupportedRule((True,), "cannot be false: special tokens are never returned"),
    "spaces_between_special_tokens": UnsupportedRule((True,), "cannot be false: special tokens are never returned"),
    "include_stop_str_in_output": UnsupportedRule((False,), "is not supported: stop strings are never returned"),
    "use_beam_search": UnsupportedRule((False,), "is not supported"),
    "length_penalty": UnsupportedRule((1.0,), "is not supported: it applies to beam search only"),
    "truncate_prompt_tokens": UnsupportedRule((), "is not supported: prompts are never truncated"),
    "allowed_token_ids": UnsupportedRule((), "is not supported; use logit_bias or structured_outputs"),
    "bad_words": UnsupportedRule(([],), "is not supported; use logit_bias"),
    "prompt_logprobs": UnsupportedRule((), "is not supported; use echo with logprobs in /v1/completions"),
    "return_tokens_as_token_ids": UnsupportedRule((False,), "is not supported; use return_token_ids"),
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "chat_template": UnsupportedRule((), "is not supported: the model's own template is used"),
    "documents": UnsupportedRule(([],), "is not supported; put them into a message"),
}
COMPLETIONS_ONLY = {"echo": UnsupportedRule((False,), "is only valid in /v1/completions")}
CHAT_ONLY = {
    "max_completion_tokens": UnsupportedRule((), "is for chat completions; use max_tokens"),
    "messages": UnsupportedRule((), "is only valid in /v1/chat/completions"),
}


def check_unsupported(body: CommonRequest) -> None:
    is_completion = isinstance(body, CompletionRequest)
    for name, rule in _rules(type(body)):
        value = getattr(body, name)
        if value is not None and value not in rule.harmless:
            raise unsupported(name, rule.why)
    _check_special(body, is_completion)
    _check_best_of(body)
    _check_stream(body)


@cache
def _rules(kind: type[CommonRequest]) -> list[tuple[str, UnsupportedRule]]:
    """Of the fields that a kind of body has."""
    rules = UNSUPPORTED | (CHAT_ONLY if issubclass(kind, CompletionRequest) else COMPLETIONS_ONLY)
    return [(name, rule) for name, rule in rules.items() if name in kind.__struct_fields__]


def _check_special(body: CommonRequest, is_completion: bool) -> None:
    """Prompts get the tokenizer's special tokens; chats those of their template."""
    if body.add_special_tokens is not None and body.add_special_tokens != is_completion:
        raise unsupported("add_special_tokens", f"is always {str(is_completion).lower()} here")


def _check_best_of(body: CommonRequest) -> None:
    best_of: int | None = getattr(body, "best_of", None)
    if best_of is not None and best_of != (body.n or 1):
        raise unsupported("best_of", "is not supported beyond n: every generated choice is returned")


def _check_stream(body: CommonRequest) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise invalid("stream_options", "needs stream: true")
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "is not supported")
