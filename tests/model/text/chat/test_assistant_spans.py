"""Which words of a chat are learned: the template's own marks, or what each answer adds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.model.text.chat.assistant_spans import render_with_spans
from windlass.model.text.chat.template import render_chat

pytestmark = pytest.mark.pure

MARKED = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}[A]{% generation %}{{ m.content }}<e>{% endgeneration %}"
    "{% else %}[U]{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)
BARE = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHANGING = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}{% endfor %}"


def chat(*words: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": word} for place, word in enumerate(words)]


@pytest.mark.parametrize("template", [MARKED, BARE])
def test_answers_and_their_ends_are_learned(template: str) -> None:
    text, spans = render_with_spans(template, chat("hi", "hello", "2+2?", "4", "bye"))
    assert text == "<s>[U]hi[A]hello<e>[U]2+2?[A]4<e>[U]bye"
    assert [text[begin:end] for begin, end in spans] == ["hello<e>", "4<e>"]


@pytest.mark.parametrize("template", [MARKED, BARE])
def test_without_an_answer_nothing_is_learned(template: str) -> None:
    assert render_with_spans(template, chat("hi")) == ("<s>[U]hi", [])


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=12), min_size=1, max_size=6))
def test_marks_leave_no_trace(words: list[str]) -> None:
    text, spans = render_with_spans(MARKED, chat(*words))
    assert text == render_chat(MARKED, chat(*words), add_generation_prompt=False)
    assert [text[begin:end] for begin, end in spans] == [f"{word}<e>" for word in words[1::2]]
    assert (text, spans) == render_with_spans(BARE, chat(*words))


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    with pytest.raises(BadInput, match=r"put \{% generation %\}"):
        render_with_spans(CHANGING, chat("a", "b", "c", "d"))


@pytest.mark.parametrize("word", ["\ufdd0", "\ufdd1", "a\ufdd0b\ufdd1c"])
def test_the_marks_themselves_are_refused(word: str) -> None:
    with pytest.raises(BadInput, match=r"U\+FDD0"):
        render_with_spans(MARKED, chat(word, "b"))
    with pytest.raises(BadInput, match=r"U\+FDD0"):
        render_with_spans(MARKED, chat("a", word))
