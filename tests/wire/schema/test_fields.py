"""Every field that OpenAI's own client can send is known: honoured, taken because it asks for nothing, or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from windlass.wire.schema.chat import ChatMessage, ChatRequest
from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.requests import chat_to_request, completion_to_requests
from windlass.wire.server.unsupported import CHAT_ONLY, COMPLETIONS_ONLY, UNSUPPORTED, check_unsupported

pytestmark = pytest.mark.pure

MESSAGES = [ChatMessage(role="user", content="hi")]
HONOURED_IN_CHATS = frozenset(
    "model messages temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty logit_bias seed stop "
    "stop_token_ids ignore_eos max_tokens max_completion_tokens n stream stream_options structured_outputs cache_salt timeout "
    "return_token_ids logprobs top_logprobs tools tool_choice response_format reasoning_effort chat_template_kwargs "
    "add_special_tokens best_of parallel_tool_calls continue_final_message add_generation_prompt min_tokens priority".split()
)
TAKEN = frozenset("user metadata safety_identifier prompt_cache_key".split())
"""They ask for nothing."""


def names(kind: Any) -> set[str]:
    return {field.name for field in msgspec.structs.fields(kind)}


def test_every_field_has_a_fate() -> None:
    assert names(ChatRequest) == HONOURED_IN_CHATS | TAKEN | (UNSUPPORTED | COMPLETIONS_ONLY).keys() & names(ChatRequest)
    rest = names(CompletionRequest) - HONOURED_IN_CHATS - TAKEN - UNSUPPORTED.keys() - CHAT_ONLY.keys()
    assert rest == {"prompt", "echo"}


def test_nothing_of_the_api_is_unknown() -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    assert set(chats.CompletionCreateParamsStreaming.__annotations__) <= names(ChatRequest)
    assert set(chats.CompletionCreateParamsBase.__annotations__) <= names(ChatRequest)
    assert set(completions.CompletionCreateParamsBase.__annotations__) <= names(CompletionRequest)


ASKING: dict[str, Any] = {
    "audio": {"voice": "x"}, "modalities": ["text", "audio"], "store": True, "prediction": {}, "web_search_options": {},
    "moderation": {}, "functions": [], "function_call": "auto", "prompt_cache_options": {},
    "prompt_cache_retention": "24h", "service_tier": "priority", "verbosity": "low", "suffix": "x",
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "include_stop_str_in_output": True,
    "use_beam_search": True, "length_penalty": 0.5, "priority": 1, "truncate_prompt_tokens": 1, "allowed_token_ids": [1],
    "bad_words": ["x"], "prompt_logprobs": 0, "return_tokens_as_token_ids": True, "guided_json": {}, "guided_regex": "x",
    "guided_choice": ["x"], "guided_grammar": "x", "add_generation_prompt": False,
    "chat_template": "x", "documents": [{}], "echo": True, "best_of": 2, "add_special_tokens": True,
}  # fmt: skip
"""Of every parameter that is refused, a value that asks for something."""


@pytest.mark.parametrize("name", sorted((UNSUPPORTED | COMPLETIONS_ONLY).keys() | {"best_of", "add_special_tokens"}))
def test_what_is_not_done_is_refused_by_name(name: str) -> None:
    with pytest.raises(ApiError, match=name) as found:
        chat_to_request(ChatRequest(messages=MESSAGES, **{name: ASKING[name]}))
    assert (found.value.param, found.value.status, found.value.code) == (name, 400, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, rule in (UNSUPPORTED | COMPLETIONS_ONLY).items() for value in rule.harmless]
)
def test_what_asks_for_nothing_is_taken(name: str, value: Any) -> None:
    check_unsupported(ChatRequest(messages=MESSAGES, **{name: value}))


@pytest.mark.parametrize(
    "body", [{"user": "me"}, {"metadata": {"a": "b"}}, {"safety_identifier": "x"}, {"prompt_cache_key": "x"}]
)
def test_who_is_asking_changes_nothing(body: dict[str, Any]) -> None:
    assert chat_to_request(ChatRequest(messages=MESSAGES, **body)) == chat_to_request(ChatRequest(messages=MESSAGES))


@pytest.mark.parametrize("body", [{"messages": []}, {"max_completion_tokens": 5}, {"best_of": 3, "n": 2}, {"suffix": "x"}])
def test_completions_refuse_what_is_of_chats(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as found:
        completion_to_requests(CompletionRequest(prompt="x", **body))
    assert found.value.param == next(iter(body))
    completion_to_requests(CompletionRequest(prompt="x", best_of=2, n=2, suffix="", store=False, add_special_tokens=True))


@pytest.mark.parametrize(
    ("stream", "options", "param"),
    [
        (None, {"include_usage": True}, "stream_options"),
        (True, {"include_obfuscation": True}, "stream_options.include_obfuscation"),
    ],
)
def test_options_of_streams(stream: bool | None, options: dict[str, bool], param: str) -> None:
    body = msgspec.convert(
        {"messages": [{"role": "user", "content": "x"}], "stream": stream, "stream_options": options}, ChatRequest
    )
    with pytest.raises(ApiError) as found:
        check_unsupported(body)
    assert found.value.param == param
