"""Bodies that are wrong are refused with the name of what is wrong, whatever the bytes are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.wire import decode as decode_module
from windlass.wire.decode import MAX_SHOWN, decode
from windlass.wire.schema.chat import ChatRequest
from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import ApiError

pytestmark = pytest.mark.pure

HI = '"messages":[{"role":"user","content":"hi"}]'


def refused(body: str | bytes, kind: type = ChatRequest) -> ApiError:
    with pytest.raises(ApiError) as found:
        decode(body.encode() if isinstance(body, str) else body, kind)
    return found.value


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ("{}", "messages", "missing_required_parameter"),
        ("[]", None, "invalid_type"),
        ("", None, "invalid_json"),
        ("{", None, "invalid_json"),
        ("nonsense", None, "invalid_json"),
        (b'{"model":"\xff"}', None, "invalid_json"),
        ('{"messages":[]}', "messages", "invalid_value"),
        ('{"messages":"hi"}', "messages", "invalid_type"),
        ('{"messages":[{"content":"hi"}]}', "messages[0].role", "missing_required_parameter"),
        ('{"messages":[{"role":"user","content":"hi"},{"role":"boss"}]}', "messages[1].role", "invalid_value"),
        ('{"messages":[{"role":"user","content":1}]}', "messages[0].content", "invalid_type"),
        ('{"messages":[{"role":"user","content":[{"text":"hi"}]}]}', "messages[0].content[0].type", "missing_required_parameter"),
        ('{"messages":[{"role":"user","colour":"red"}]}', "messages[0].colour", "unknown_parameter"),
        (f'{{{HI},"temperature":"warm"}}', "temperature", "invalid_type"),
        (f'{{{HI},"temperature":-1}}', "temperature", "invalid_value"),
        (f'{{{HI},"temperature":1e999}}', "temperature", "invalid_value"),
        (f'{{{HI},"top_p":1.5}}', "top_p", "invalid_value"),
        (f'{{{HI},"n":0}}', "n", "invalid_value"),
        (f'{{{HI},"n":1.5}}', "n", "invalid_type"),
        (f'{{{HI},"max_tokens":-1}}', "max_tokens", "invalid_value"),
        (f'{{{HI},"logit_bias":{{"word":1}}}}', "logit_bias", "invalid_type"),
        (f'{{{HI},"logit_bias":{{"5":101}}}}', "logit_bias", "invalid_value"),
        (f'{{{HI},"stop":[1]}}', "stop[0]", "invalid_type"),
        (f'{{{HI},"tools":[{{"type":"function","function":{{}}}}]}}', "tools[0].function.name", "missing_required_parameter"),
        (f'{{{HI},"chat_template_kwargs":{{"style":"x"}}}}', "chat_template_kwargs.style", "unknown_parameter"),
        (f'{{{HI},"presence_penalty":2.5}}', "presence_penalty", "invalid_value"),
        (f'{{{HI},"temperature":1e39}}', "temperature", "invalid_value"),
        (f'{{{HI},"repetition_penalty":1e-40}}', "repetition_penalty", "invalid_value"),
        (f'{{{HI},"top_p":0}}', "top_p", "invalid_value"),
        (f'{{{HI},"max_tokens":{10**30}}}', "max_tokens", "invalid_value"),
        (f'{{{HI},"max_completion_tokens":{2**31}}}', "max_completion_tokens", "invalid_value"),
        (f'{{{HI},"top_k":{10**30}}}', "top_k", "invalid_value"),
        (f'{{{HI},"stop_token_ids":[{10**30}]}}', "stop_token_ids[0]", "invalid_value"),
        (f'{{{HI},"logit_bias":{{"{10**30}":1}}}}', "logit_bias", "invalid_value"),
        (f'{{{HI},"logit_bias":{{"-1":1}}}}', "logit_bias", "invalid_value"),
        (f'{{{HI},"n":{10**30}}}', "n", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(body: str | bytes, param: str | None, code: str) -> None:
    found = refused(body)
    assert (found.param, found.code, found.status) == (param, code, 400)
    assert msgspec.json.decode(found.body)["error"].keys() == {"message", "type", "param", "code"}
    assert param is None or param in str(found)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ('{"a":1}', "prompt"),
        ("[1,-2]", "prompt[1]"),
        ("[[1,true]]", "prompt[0][1]"),
        ("null", "prompt"),
        ("[1.5]", "prompt[0]"),
        (f"[{10**30}]", "prompt[0]"),
        (f"[[1,{2**31}]]", "prompt[0][1]"),
    ],
)
def test_prompts_of_no_known_kind(prompt: str, param: str) -> None:
    assert refused(f'{{"prompt":{prompt}}}', CompletionRequest).param == param


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    assert "did you mean temperature?" in str(refused(f'{{{HI},"temprature":1}}'))


def test_a_name_of_megabytes_is_not_compared_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which took a second, for everybody: its beginning is, and no pattern is looked for in all of it."""
    compared: list[int] = []
    matched: list[int] = []

    def close_matches(name: str, *_: Any, **__: Any) -> list[str]:
        compared.append(len(name))
        return []

    class Noting:
        def __init__(self, pattern: Any) -> None:
            self._pattern = pattern

        def match(self, text: str) -> Any:
            matched.append(len(text))
            return self._pattern.match(text)

    monkeypatch.setattr(decode_module.difflib, "get_close_matches", close_matches)
    monkeypatch.setattr(decode_module, "_PATH", Noting(decode_module._PATH))
    body = f'{{{HI},"{"temperatur" * 700_000}":1}}'.encode()
    assert len(refused(body).param or "") == MAX_SHOWN
    assert compared == [MAX_SHOWN] and max(matched) < 10_000


def test_nesting_without_end_is_refused() -> None:
    assert refused("[" * 100_000).code == "invalid_type"
    deep = '{"a":' * 50_000
    assert refused(f'{{{HI},"tools":[{{"type":"function","function":{{"name":"f","parameters":{deep}').code == "invalid_json"


def test_a_refusal_quotes_little() -> None:
    assert len(str(refused(f'{{{HI},"{"x" * 10_000}":1}}'))) < 500
    assert len(str(refused(f'{{"messages":[{{"role":"{"x" * 10_000}"}}]}}'))) < 500


def test_null_is_the_same_as_left_out() -> None:
    names = [field.name for field in msgspec.structs.fields(ChatRequest) if field.name not in ("messages", "model")]
    nulls = ",".join(f'"{name}":null' for name in names)
    assert decode(f"{{{HI},{nulls}}}".encode(), ChatRequest) == decode(f"{{{HI}}}".encode(), ChatRequest)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from([field.name for field in msgspec.structs.fields(ChatRequest)])


@given(st.dictionaries(fields, json_values, max_size=4))
def test_whatever_the_values_are_it_is_an_answer_or_a_refusal(values: dict[str, object]) -> None:
    try:
        decode(msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}], **values}), ChatRequest)
    except ApiError as refusal:
        assert refusal.param is None or refusal.param.split("[")[0].split(".")[0] in ChatRequest.__struct_fields__


@given(st.binary(max_size=40))
def test_whatever_the_bytes_are(body: bytes) -> None:
    with pytest.raises(ApiError):
        decode(body, ChatRequest)
