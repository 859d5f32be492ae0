from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from byte_vocab import TEXTUAL
from fake_text import encoded, model_text

from windlass.core.request import Request, TokenLogprob
from windlass.runtime.engine.client.text_processor import TextProcessor

pytestmark = pytest.mark.cpu


def test_tokens_that_are_pieces_of_a_character_have_their_bytes() -> None:
    wording = TextProcessor(dataclasses.replace(model_text(), tokenizer=TEXTUAL.tokenizer))
    tokens = TEXTUAL.tokenizer.encode("a€", special=False)
    entries = [TokenLogprob(token_id=token, logprob=-1.0, top=(TokenLogprob(token_id=token, logprob=-1.0),)) for token in tokens]
    for _ in range(2):  # the second time they are known
        found = wording.with_text(entries)
        assert [entry.raw for entry in found] == [b"", b"\xe2", b"\x82", b"\xac"]
        assert [entry.top[0].raw for entry in found] == [entry.raw for entry in found]
        assert found[0].token == "a"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"k": {}}}}}
HELLO: dict[str, Any] = {"role": "user", "content": "hi"}


def rendered(template: str, **request: Any) -> str:
    wording = TextProcessor(dataclasses.replace(model_text(template), tokenizer=TEXTUAL.tokenizer))
    return wording.decode(encoded(wording, Request(**request)).tokens)


def test_a_template_without_tools_gets_them_by_convention() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"k": 1}}}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    text = rendered(CHATML, messages=({"role": "system", "content": "Be brief."}, HELLO, called, result), tools=(TOOL,))
    system, _, rest = text.partition("<|im_end|>")
    assert "Be brief." in system and '{"name": "f", "parameters"' in system and "<tool_call>" in system
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"k": 1}}\n</tool_call>' in rest
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response>" in rest
    assert "<tool_call>" not in rendered(CHATML, messages=(HELLO,), tools=(TOOL,), tool_choice="none")


def test_a_template_without_a_system_role_gets_them_in_the_first_question() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    text = rendered(template, messages=(HELLO,), tools=(TOOL,))
    assert text.startswith("<|im_start|>user\nYou can call") and "\n\nhi<|im_end|>" in text


def test_a_call_by_convention_is_read() -> None:
    wording = TextProcessor(dataclasses.replace(model_text(CHATML), tokenizer=TEXTUAL.tokenizer))
    stream = encoded(wording, Request(messages=(HELLO,), tools=(TOOL,))).stream
    written = TEXTUAL.tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {"k": 1}}\n</tool_call>', special=False)
    [call] = stream.push(written).tool_calls
    assert (call.name, call.arguments) == ("f", '{"k": 1}')


BEGUN: dict[str, Any] = {"role": "assistant", "content": "The sky"}


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        (CHATML, BEGUN, "<|im_start|>assistant\nThe sky"),
        (CHATML + "<think>\n", BEGUN, "<|im_start|>assistant\n<think></think>\nThe sky"),
        (CHATML + "<think>\n", BEGUN | {"reasoning_content": "Hm."}, "<think>Hm.</think>\nThe sky"),
        (CHATML + "{# <|channel|><|message|> #}", BEGUN, "assistant\n<|channel|>final<|message|>The sky"),
    ],
)
def test_a_begun_answer_is_continued(template: str, message: dict[str, Any], expected: str) -> None:
    assert rendered(template, messages=(HELLO, message), continues_answer=True).endswith(expected)


def test_no_effort_is_no_wish_of_a_model_that_does_not_reason() -> None:
    assert rendered(CHATML, messages=(HELLO,), reasoning_effort="none") == rendered(CHATML, messages=(HELLO,))
