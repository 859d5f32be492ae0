"""A request comes out of JSON as it went in, and bodies mean what the API says they mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import wire_values as values
from hypothesis import given

from windlass.core.request import Constraint, Request, Sampling
from windlass.errors import BadInput
from windlass.wire.client.request_bodies import request_to_chat, request_to_completion, score_to_completion
from windlass.wire.decode import convert, decode
from windlass.wire.schema.chat import ChatRequest
from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.requests import (
    COMPLETION_TOKENS,
    RequestLimits,
    chat_to_request,
    completion_to_requests,
    expand_n,
    param_of,
)

pytestmark = pytest.mark.pure

WIDE = RequestLimits(max_top_logprobs=128)


def chat(limits: RequestLimits = RequestLimits(), **body: Any) -> Request:  # noqa: B008 (frozen)
    return chat_to_request(_decoded({"messages": [{"role": "user", "content": "hi"}], **body}, ChatRequest), limits)


def completions(limits: RequestLimits = RequestLimits(), **body: Any) -> list[Request]:  # noqa: B008 (frozen)
    return completion_to_requests(_decoded(body, CompletionRequest), limits)


def _decoded(body: dict[str, Any], kind: Any) -> Any:
    return decode(msgspec.json.encode(body), kind)


# --- there and back --------------------------------------------------------------------------------------------------


@given(values.requests("messages"))
def test_a_chat_comes_back_as_it_went(request: Request) -> None:
    body = msgspec.json.encode(request_to_chat(request, "m", extensions=True))
    assert chat_to_request(decode(body, ChatRequest), WIDE) == request


@given(values.requests("prompt") | values.requests("token_ids"))
def test_a_prompt_comes_back_as_it_went(request: Request) -> None:
    body = msgspec.json.encode(request_to_completion(request, "m", extensions=True))
    assert completion_to_requests(decode(body, CompletionRequest), WIDE) == [request]


@given(values.requests("messages"))
def test_what_a_request_says_holds_whatever_the_servers_defaults(request: Request) -> None:
    odd = RequestLimits(
        max_top_logprobs=128, sampling=Sampling(temperature=0.3, top_k=7, top_p=0.6, min_p=0.2, repetition_penalty=1.3)
    )
    body = msgspec.json.encode(request_to_chat(request, "m", extensions=True))
    assert chat_to_request(decode(body, ChatRequest), odd).sampling == request.sampling


def test_a_plain_request_is_sent_as_any_server_takes_it() -> None:
    request = Request(messages=({"role": "user", "content": "hi"},), max_tokens=5)
    assert msgspec.json.decode(msgspec.json.encode(request_to_chat(request, "m"))) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_tools_are_sent_whole() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    history = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [called]})
    request = Request(messages=history, tools=(tool,), tool_choice="f")
    sent = msgspec.json.decode(msgspec.json.encode(request_to_chat(request, "m")))
    assert sent["tools"] == [tool]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert sent["messages"][1]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]


def test_a_message_with_a_key_that_no_server_knows_is_not_sent() -> None:
    with pytest.raises(BadInput, match=r"messages\[0\]\.colour"):
        request_to_chat(Request(messages=({"role": "user", "content": "x", "colour": "red"},)), "m")


def test_scoring_asks_for_the_prompt_alone() -> None:
    from windlass.core.request import ScoreRequest

    sent = msgspec.json.decode(msgspec.json.encode(score_to_completion(ScoreRequest(prompt="x", top=2), "m")))
    assert sent == {"model": "m", "prompt": "x", "max_tokens": 0, "temperature": 0.0, "echo": True, "logprobs": 2}


# --- what bodies mean ------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({}, "max_tokens", None),
        ({"max_tokens": 7}, "max_tokens", 7),
        ({"max_completion_tokens": 7}, "max_tokens", 7),
        ({"max_completion_tokens": 7, "max_tokens": 7}, "max_tokens", 7),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"stop": []}, "stop", ()),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs", 3),
        ({"logprobs": False}, "logprobs", None),
        ({"reasoning_effort": "none"}, "reasoning_effort", "none"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "high"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "thinking", False),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "low"}, "thinking", True),
        ({"top_k": -1}, "sampling", Sampling()),
        ({"top_k": 0}, "sampling", Sampling()),
        ({"top_k": 5}, "sampling", Sampling(top_k=5)),
        ({"logit_bias": {"12": -100, "7": 1.5}}, "sampling", Sampling(logit_bias={12: -100.0, 7: 1.5})),
        ({"seed": 3, "temperature": 0}, "sampling", Sampling(seed=3, temperature=0.0)),
        ({"response_format": {"type": "text"}}, "constraint", None),
        ({"response_format": {"type": "json_object"}}, "constraint", Constraint(kind="json_object")),
        (
            {"response_format": {"type": "json_object", "schema": {"const": 1}}},
            "constraint",
            Constraint(kind="json_schema", value='{"const":1}'),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
            "constraint",
            Constraint(kind="json_schema", value=msgspec.json.encode(SCHEMA).decode()),
        ),
        ({"structured_outputs": {"regex": "a+"}}, "constraint", Constraint(kind="regex", value="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "constraint", Constraint(kind="choice", value='["a","b"]')),
        (
            {"structured_outputs": {"json": '{"a":1}'}},
            "constraint",
            Constraint(kind="json_schema", value='{"a":1}', is_strict=False),
        ),
        ({"structured_outputs": {"json_object": True}}, "constraint", Constraint(kind="json_object")),
        ({"timeout": 2.5}, "deadline_seconds", 2.5),
    ],
)
def test_a_chat_means(body: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(chat(**body), field) == value


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "meant"),
    [(None, "auto"), ("none", "none"), ("required", "required"), ({"type": "function", "function": {"name": "f"}}, "f")],
)
def test_choices_of_tools(choice: Any, meant: str) -> None:
    found = chat(tools=[TOOL], tool_choice=choice)
    assert (found.tool_choice, found.tools) == (meant, (TOOL,))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 17}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**65}, "seed"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop": ""}, "stop"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "reasoning_effort"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "g"}}}, "tool_choice.type"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "auto"}}]}, "tools[0].function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "text", "regex": "x"}}, "response_format.regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"structured_outputs": {"regex": "x", "choice": ["y"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ],
)
def test_a_chat_that_cannot_be_meant(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as found:
        chat(**body)
    assert found.value.param == param


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a\nb"},
        ),
        ({"role": "user", "content": "x", "type": "text"}, {"role": "user", "content": "x"}),
        ({"role": "assistant", "content": None, "refusal": None, "annotations": []}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "refusal": "no"}, {"role": "assistant", "content": "no"}),
        (
            {"role": "assistant", "content": "x", "reasoning": "y"},
            {"role": "assistant", "content": "x", "reasoning_content": "y"},
        ),
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, {"role": "tool", "content": "4", "tool_call_id": "1"}),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ),
    ],
)
def test_a_template_sees(message: dict[str, Any], seen: dict[str, Any]) -> None:
    assert chat(messages=[message]).messages == (seen,)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "function", "content": "x"}, "messages[0].function_call"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "audio": {"id": "y"}}, "messages[0].audio"),
        ({"role": "user", "content": "x", "tool_call_id": "y"}, "messages[0].tool_call_id"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_a_message_that_no_template_can_see(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as found:
        chat(messages=[message])
    assert found.value.param == param


# --- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [
        ("a", [("a", None)]),
        ("", [("", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, (1, 2))]),
        ([[1, 2], [3]], [(None, (1, 2)), (None, (3,))]),
    ],
)
def test_prompts(prompt: Any, meant: list[Any]) -> None:
    assert [(request.prompt, request.token_ids) for request in completions(prompt=prompt)] == meant


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], [1, [2]]])
def test_prompts_that_mix(prompt: Any) -> None:
    with pytest.raises(ApiError) as found:
        completions(prompt=prompt)
    assert found.value.param == "prompt"


def test_choices_share_what_their_answers_are_held_to() -> None:
    """It is read once, and known by what it is when a grammar is made of it."""
    found = completions(
        prompt=["a", "b", "c"], n=2, seed=1, response_format={"type": "json_object", "schema": {"type": "string"}}
    )
    assert len(found) == 6 and len({id(request.constraint) for request in found}) == 1


def test_too_many_prompts_are_refused_and_not_cut() -> None:
    assert len(completions(RequestLimits(max_choices=3), prompt=["x"] * 3)) == 3
    with pytest.raises(ApiError, match="4 entries"):
        completions(RequestLimits(max_choices=3), prompt=["x"] * 4)
    with pytest.raises(ApiError, match="2 prompts") as found:
        completions(RequestLimits(max_choices=3), prompt=["x"] * 2, n=2)
    assert found.value.param == "n"


def test_what_cannot_fit_is_refused_before_it_is_looked_at() -> None:
    limits = RequestLimits(context_tokens=4)
    message = {"role": "user", "content": ""}
    assert len(completions(limits, prompt=[1, 2, 3, 4])) == 1
    assert chat(limits, messages=[message] * 4).messages is not None
    for asked in (
        lambda: completions(limits, prompt=[1] * 5),
        lambda: completions(limits, prompt=[[1], [1] * 5]),
        lambda: chat(limits, messages=[message] * 5),
        lambda: chat(limits, tools=[{"type": "function", "function": {"name": "f"}}] * 5),
    ):
        with pytest.raises(ApiError) as found:
            asked()
        assert found.value.code == "context_length_exceeded" and found.value.param in ("prompt", "messages", "tools")


@pytest.mark.parametrize(
    ("field", "asked", "param"),
    [
        ("prompt", {}, "messages"),
        ("messages", {}, "messages"),
        ("token_ids", {}, None),
        ("temperature", {}, "temperature"),
        ("max_tokens", {"max_tokens": 1}, "max_tokens"),
        ("max_tokens", {"max_completion_tokens": 1}, "max_completion_tokens"),
        ("constraint", {"response_format": {"type": "json_object"}}, "response_format"),
        ("constraint", {"structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ("thinking", {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ("thinking", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("logprobs", {"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ("logprobs", {"logprobs": True}, "logprobs"),
        ("deadline_seconds", {"timeout": 3}, "timeout"),
        ("owner", {}, None),
        ("", {}, None),
    ],
)
def test_what_is_to_blame_has_the_name_that_was_sent(field: str, asked: dict[str, Any], param: str | None) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert param_of(field, convert({"messages": messages, **asked}, ChatRequest)) == param


def test_what_is_to_blame_in_a_completion() -> None:
    body = convert({"prompt": [1]}, CompletionRequest)
    assert [param_of(field, body) for field in ("prompt", "token_ids", "prompt_logprobs")] == ["prompt", "prompt", "logprobs"]


def test_every_field_of_core_that_can_be_to_blame_has_a_name_in_the_api() -> None:
    """But those that no body can set."""
    names = {field.name for kind in (Request, Sampling) for field in msgspec.structs.fields(kind)}
    body = convert({"messages": [{"role": "user", "content": "x"}]}, ChatRequest)
    unnamed = {name for name in names if param_of(name, body) is None}
    assert unnamed == {"sampling", "owner", "token_ids", "prompt_logprobs_start"}


def test_choices_are_ordered_by_prompt_and_seeds_count_on() -> None:
    found = completions(prompt=["a", "b"], n=2, seed=5)
    assert [(request.prompt, request.sampling.seed) for request in found] == [("a", 5), ("a", 6), ("b", 5), ("b", 6)]
    assert [request.sampling.seed for request in completions(prompt="a", n=2)] == [None, None]


def test_the_largest_seed_has_copies_too() -> None:
    last = Request(prompt="x", sampling=Sampling(seed=2**64 - 1))
    assert len({copy.sampling.seed for copy in expand_n(last, 4)}) == 4


def test_defaults_of_a_completion() -> None:
    [found] = completions(prompt="a")
    assert (found.max_tokens, found.logprobs, found.prompt_logprobs) == (COMPLETION_TOKENS, None, None)
    [found] = completions(prompt="a", echo=True, logprobs=2, max_tokens=0)
    assert (found.max_tokens, found.logprobs, found.prompt_logprobs) == (0, 2, 2)
    [found] = completions(prompt="a", echo=True)
    assert found.prompt_logprobs is None


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_servers_defaults_hold_where_nothing_is_said() -> None:
    limits = RequestLimits(sampling=Sampling(temperature=0.6, top_k=20), deadline_seconds=60)
    [found] = completions(limits, prompt="a", top_p=0.5)
    assert found.sampling == Sampling(temperature=0.6, top_k=20, top_p=0.5)
    assert found.deadline_seconds == 60
    [found] = completions(limits, prompt="a", top_k=-1, timeout=5)
    assert (found.sampling.top_k, found.deadline_seconds) == (None, 5)
    with pytest.raises(ApiError) as refused:
        completions(limits, prompt="a", timeout=61)
    assert refused.value.param == "timeout"


# --- tools, and answers that have begun ------------------------------------------------------------------------------

F, G = ({"type": "function", "function": {"name": name}} for name in "fg")
ASSISTANT = {"role": "assistant", "content": "The sky"}
USER = {"role": "user", "content": "hi"}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_the_ones_shown() -> None:
    found = chat(tools=[F, G], tool_choice=allowed("required", "g"))
    assert [tool["function"]["name"] for tool in found.tools] == ["g"] and found.tool_choice == "required"
    with pytest.raises(ApiError) as refused:
        chat(tools=[F], tool_choice=allowed("auto", "g"))
    assert refused.value.param == "tool_choice.allowed_tools.tools"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [USER]}, False),
        ({"messages": [USER, ASSISTANT]}, True),
        ({"messages": [USER, ASSISTANT], "continue_final_message": False}, False),
        ({"messages": [USER, ASSISTANT], "continue_final_message": True, "add_generation_prompt": False}, True),
        ({"messages": [USER, ASSISTANT], "response_format": {"type": "json_object"}}, False),
        ({"messages": [USER, {**ASSISTANT, "content": None}]}, False),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(body: dict[str, Any], expected: bool) -> None:
    assert chat(**body).continues_answer is expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [USER, ASSISTANT], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": [USER, ASSISTANT], "add_generation_prompt": False}, None),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**body)
    assert refused.value.param == (param or "add_generation_prompt")


def test_cache_control_is_ignored() -> None:
    marked = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    assert chat(messages=[marked]).messages == ({"role": "user", "content": "hi"},)


def test_a_schema_of_a_tool_is_at_fault_where_only_tools_have_one() -> None:
    body = _decoded({"messages": [USER], "tools": [F]}, ChatRequest)
    assert param_of("constraint", body) == "tools"


def test_a_call_that_was_cut_off_comes_back() -> None:
    """As OpenAI takes it: any text is an argument."""
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": "b'}}]}
    [_, message] = chat(messages=[USER, called]).messages or ()
    assert message["tool_calls"][0]["function"]["arguments"] == {"malformed_arguments": '{"a": "b'}
