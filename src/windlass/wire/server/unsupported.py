"""Parameters that are known and not done here: taken where they ask for nothing, refused by name where they ask for something."""

from __future__ import annotations

from typing import Any, NamedTuple

from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import invalid, unsupported
from windlass.wire.schema.sampling import CommonRequest


class Rule(NamedTuple):
    harmless: tuple[Any, ...]
    """Values that change nothing. Null always is one."""
    why: str


_GUIDED = Rule((), "is an old name; use structured_outputs or response_format")
_TEXT_ONLY = "is not offered: answers are text"

REFUSED: dict[str, Rule] = {
    # OpenAI's
    "audio": Rule((), _TEXT_ONLY),
    "modalities": Rule((["text"],), _TEXT_ONLY),
    "store": Rule((False,), "is not offered: nothing is kept"),
    "prediction": Rule((), "is not offered"),
    "web_search_options": Rule((), "is not offered: nothing is looked up"),
    "moderation": Rule((), "is not offered"),
    "functions": Rule((), "is an old name; use tools"),
    "function_call": Rule((), "is an old name; use tool_choice"),
    "parallel_tool_calls": Rule((True,), "cannot be false: the model decides how many calls it makes"),
    "prompt_cache_options": Rule(
        (), "is not offered: prompts that begin alike share their cache; use cache_salt to keep them apart"
    ),
    "prompt_cache_retention": Rule(("in_memory", "in-memory"), "is in_memory here"),
    "service_tier": Rule(("auto", "default"), "is not offered: there is one tier"),
    "verbosity": Rule(("medium",), "is not offered; say it in a message"),
    "suffix": Rule(("",), "is not offered: text is continued, not filled in"),
    # other servers'
    "min_tokens": Rule((0,), "is not offered"),
    "skip_special_tokens": Rule((True,), "cannot be false: answers have no special tokens"),
    "spaces_between_special_tokens": Rule((True,), "cannot be false: answers have no special tokens"),
    "include_stop_str_in_output": Rule((False,), "is not offered: an answer ends before its stop string"),
    "use_beam_search": Rule((False,), "is not offered"),
    "length_penalty": Rule((1.0,), "is not offered: it belongs to beam search"),
    "priority": Rule((0,), "is not offered: requests get equal shares"),
    "truncate_prompt_tokens": Rule((), "is not offered: nothing is truncated"),
    "allowed_token_ids": Rule((), "is not offered; use logit_bias or structured_outputs"),
    "bad_words": Rule(([],), "is not offered; use logit_bias"),
    "prompt_logprobs": Rule((), "is not offered; use echo with logprobs in /v1/completions"),
    "return_tokens_as_token_ids": Rule((False,), "is not offered; use return_token_ids"),
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "add_generation_prompt": Rule((True,), "cannot be false: the model answers"),
    "continue_final_message": Rule((False,), "is not offered; use /v1/completions"),
    "chat_template": Rule((), "is not taken from requests: the model's own is used"),
    "documents": Rule(([],), "is not offered; put them into a message"),
}
COMPLETIONS_ONLY = {"echo": Rule((False,), "is for /v1/completions")}
CHAT_ONLY = {
    "max_completion_tokens": Rule((), "is for chats; use max_tokens"),
    "messages": Rule((), "is for /v1/chat/completions"),
}


def check_refused(body: CommonRequest) -> None:
    is_completion = isinstance(body, CompletionRequest)
    for name, rule in (REFUSED | (CHAT_ONLY if is_completion else COMPLETIONS_ONLY)).items():
        value = getattr(body, name, None)
        if value is not None and value not in rule.harmless:
            raise unsupported(name, rule.why)
    _check_special(body, is_completion)
    _check_best_of(body)
    _check_stream(body)


def _check_special(body: CommonRequest, is_completion: bool) -> None:
    """A prompt gets the tokenizer's special tokens, a chat those of its template."""
    if body.add_special_tokens is not None and body.add_special_tokens != is_completion:
        raise unsupported("add_special_tokens", f"is always {str(is_completion).lower()} here")


def _check_best_of(body: CommonRequest) -> None:
    best_of: int | None = getattr(body, "best_of", None)
    if best_of is not None and best_of != (body.n or 1):
        raise unsupported("best_of", "is not offered: as many answers are drawn as are given out, so it can only equal n")


def _check_stream(body: CommonRequest) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise invalid("stream_options", "needs stream: true")
    for name in ("include_obfuscation", "continuous_usage_stats"):
        if getattr(options, name):
            raise unsupported(f"stream_options.{name}", "is not offered")
