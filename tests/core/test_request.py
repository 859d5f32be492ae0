from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from windlass.core.request import GREEDY, Constraint, Delta, Request, Sampling, ScoreRequest, Scores, TokenLogprob, Usage
from windlass.errors import BadInput

pytestmark = pytest.mark.pure

TOOL = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it should be between 0 and 100"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e39}, "temperature is 1e\\+39; it should be between 0 and 100"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40; it should be between 0.01 and 100"),
        ({"top_k": 10**30}, "top_k is a number of more than 64 bits"),
        ({"logit_bias": {10**5000: 1.0}}, "logit_bias has token a number of more than 64 bits"),
        ({"logit_bias": {2**31: 1.0}}, "logit_bias has token 2147483648; token ids are between 0 and 2,147,483,647"),
        ({"top_k": 0}, "top_k is 0; it should be between 1 and 2,147,483,647"),
        ({"top_p": 0.0}, "top_p is 0; it should be more than 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.5}, "min_p is -0.5; it should be between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0; it should be between 0.01 and 100"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; it should be between -2 and 2"),
        ({"frequency_penalty": -3.0}, "frequency_penalty is -3"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has token -1"),
        ({"logit_bias": {5: 200.0}}, "logit_bias of token 5 is 200"),
        ({"seed": 2**64}, "seed is a number of more than 64 bits"),
    ],
)
def test_sampling_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as found:
        Sampling(**changes)
    assert [found.value.field] == list(changes)


def test_sampling_knows_what_it_asks_for() -> None:
    assert GREEDY.is_greedy
    assert Sampling(temperature=1e-6).is_greedy
    assert not Sampling().is_greedy
    assert not Sampling().has_penalties
    for changes in ({"repetition_penalty": 1.1}, {"presence_penalty": -1.0}, {"frequency_penalty": 0.1}):
        assert Sampling(**changes).has_penalties


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "exactly one of messages, prompt and token_ids; this one has none of them"),
        ({"prompt": "a", "token_ids": (1,)}, "prompt and token_ids"),
        ({"prompt": "a", "thinking": True}, "thinking is only valid with messages"),
        ({"prompt": "a", "tools": ({"name": "f"},)}, "tools is only valid with messages"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens is -1"),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens is a number of more than 64 bits"),
        ({"token_ids": (1, 10**30)}, "token_ids has token a number of more than 64 bits"),
        ({"token_ids": (1, -1)}, "token_ids has token -1"),
        ({"prompt": "a", "stop_token_ids": (2**31,)}, "stop_token_ids has token 2147483648"),
        ({"prompt": "a", "prompt_logprobs_start": 2**63}, "prompt_logprobs_start is 9223372036854775808"),
        ({"prompt": "a", "stop": ("",)}, "none of them empty"),
        ({"prompt": "a", "stop": ("x",) * 65}, "stop has 65 strings"),
        ({"prompt": "a", "logprobs": 129}, "logprobs is 129; it should be between 0 and 128"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"prompt": "a", "prompt_logprobs_start": -1}, "prompt_logprobs_start is -1"),
        ({"prompt": "a", "deadline_seconds": 0.0}, "deadline_seconds is 0; it should be more than 0"),
        ({"prompt": "a", "deadline_seconds": math.nan}, "deadline_seconds is nan"),
        ({"prompt": "a", "tool_choice": "required"}, "tool_choice is 'required', but there are no tools"),
        ({"messages": (), "tools": (TOOL,), "tool_choice": "g"}, "tool_choice names 'g', which is not among the tools: f"),
        (
            {"messages": (), "tools": (TOOL,), "tool_choice": "f", "constraint": Constraint(kind="json_object")},
            "remove one of them",
        ),
    ],
)
def test_requests_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as found:
        Request(**changes)
    asked = [name for name in changes if name not in ("prompt", "messages", "tools", "constraint")]
    assert found.value.field == ("prompt", *changes, *asked)[-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "jsonschema", "value": "{}"}, "unknown constraint kind 'jsonschema'; use json_object, "),
        ({"kind": "json_object", "value": "{}"}, "json_object takes no value"),
        ({"kind": "regex"}, "regex needs a value"),
        ({"kind": "json_schema", "value": "{"}, "the JSON schema is not valid JSON"),
        ({"kind": "json_schema", "value": "[" * 100_000}, "the JSON schema is n"),
        ({"kind": "json_schema", "value": "3"}, "a JSON schema should be an object"),
        ({"kind": "choice", "value": "a"}, "the list of choices is not valid JSON"),
        ({"kind": "choice", "value": "[1]"}, "a JSON list of strings"),
        ({"kind": "choice", "value": "[]"}, "at least one string"),
    ],
)
def test_constraints_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as found:
        Constraint(**changes)
    assert found.value.field == "constraint"


def test_tools_are_chosen_by_name_with_or_without_their_wrapping() -> None:
    for tool in (TOOL, {"type": "function", "function": TOOL}):
        assert Request(messages=(), tools=(tool,), tool_choice="f").tool_choice == "f"


def test_choices_are_texts() -> None:
    assert Constraint(kind="choice", value='["yes", "n\\u00f6"]').choices == ("yes", "nö")


def test_scoring_takes_text_or_tokens() -> None:
    for given in (
        {},
        {"prompt": "a", "token_ids": (1,)},
        {"prompt": "a", "top": 1000},
        {"prompt": "a", "start": 2**64},
        {"token_ids": (2**64,)},
    ):
        with pytest.raises(BadInput):
            ScoreRequest(**given)
    assert ScoreRequest(token_ids=(1, 2)).start == 0


def test_empty_text_is_text() -> None:
    """Whether it is too short is for the engine to say."""
    assert Request(prompt="").prompt == ""
    assert Request(token_ids=()).token_ids == ()


def test_values_survive_the_wire() -> None:
    request = Request(
        messages=({"role": "user", "content": [{"type": "text", "text": "Hi"}]},),
        sampling=Sampling(logit_bias={3: -1.0}, seed=2**63, top_k=4),
        stop=("\n",),
        thinking=False,
        constraint=Constraint(kind="regex", value="a+"),
        deadline_seconds=1.5,
        owner="me",
    )
    for encode, decode in ((msgspec.json.encode, msgspec.json.decode), (msgspec.msgpack.encode, msgspec.msgpack.decode)):
        assert decode(encode(request), type=Request) == request
    nested = TokenLogprob(token_id=1, logprob=-0.5, top=(TokenLogprob(token_id=2, logprob=-1.0),))
    delta = Delta(
        token_ids=(1,), logprobs=(nested,), prompt_logprobs=(None, nested), usage=Usage(prompt_tokens=1, completion_tokens=1)
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta) == delta


def test_what_is_decoded_is_checked_too() -> None:
    with pytest.raises((BadInput, msgspec.ValidationError), match="top_p"):
        msgspec.json.decode(b'{"prompt": "a", "sampling": {"top_p": 7}}', type=Request)
    with pytest.raises(msgspec.ValidationError, match="unknown field `temprature`"):
        msgspec.json.decode(b'{"temprature": 1}', type=Sampling)


def test_scores_add_up() -> None:
    entries = (None, TokenLogprob(token_id=1, logprob=-0.5), TokenLogprob(token_id=2, logprob=-0.25))
    assert Scores(token_ids=(0, 1, 2), logprobs=entries).total == -0.75
