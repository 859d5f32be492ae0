"""Rows to questions: templates, the seeded choice, worked examples."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.tasks.evaluate.tasks.questions import Asked, choose, questions, render
from windlass.tasks.evaluate.tasks.task import Task, parse_task

pytestmark = pytest.mark.pure

TOML = """
name = "t"
category = "math"
source.file = "x"
prompt.chat = "Q: {q}"
prompt.completion = "{q} ="
prompt.preamble = "About {s}.\\n\\n"
prompt.target = " {a}!"
answer = "{a}"
subject = "{s}"
grader = "exact"
"""
ROWS: list[dict[str, Any]] = [{"q": f"q{n}", "a": f"a{n}", "s": "xy"[n % 2]} for n in range(8)]
DEV: list[dict[str, Any]] = [{"q": f"d{n}", "a": f"e{n}", "s": "xy"[n % 2]} for n in range(4)]


def task(extra: str = "") -> Task:
    return parse_task((TOML + extra).encode(), "t.toml")


@pytest.mark.parametrize(
    ("template", "made"), [("{a}-{b}", "1-2"), ("{{a}} {a}", "{a} 1"), ("f(x) = { x }", "f(x) = { x }"), ("", "")]
)
def test_fields_are_filled_in(template: str, made: str) -> None:
    assert render(template, {"a": 1, "b": 2}, "t") == made


def test_a_field_in_a_value_is_not_filled_in_again() -> None:
    assert render("{a}", {"a": "{b} {{", "b": "x"}, "t") == "{b} {{"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BadInput, match="no field 'c'; they have a, b"):
        render("{c}", {"a": 1, "b": 2}, "t")


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 3))
def test_fewer_questions_are_among_more(few: int, many: int, seed: int) -> None:
    rows = [{"q": str(n)} for n in range(30)]
    few, many = sorted((few, many))
    chosen = choose(task(), rows, few, seed)
    assert set(chosen) <= set(choose(task(), rows, many, seed))
    assert len(chosen) == min(few, 30) and chosen == sorted(chosen)


def test_another_seed_chooses_others() -> None:
    rows = [{"q": str(n)} for n in range(200)]
    assert choose(task(), rows, 20, 0) != choose(task(), rows, 20, 1)


def test_worked_examples_are_of_the_questions_subject() -> None:
    made = questions(task(), ROWS, DEV, "completion", Asked(shots=2))
    assert made[0].prompt == "About x.\n\nd0 = e0!\n\nd2 = e2!\n\nq0 ="
    assert made[1].prompt == "About y.\n\nd1 = e1!\n\nd3 = e3!\n\nq1 ="


def test_a_chat_has_examples_as_turns() -> None:
    first = questions(task(), ROWS, DEV, "chat", Asked(shots=1))[0]
    assert [message["role"] for message in first.messages or ()] == ["user", "assistant", "user"]
    assert [message["content"] for message in first.messages or ()] == ["About x.\n\nQ: d0", "e0!", "Q: q0"]


def test_without_examples_of_its_own_a_set_lends_some_and_does_not_ask_them() -> None:
    rows = [{"q": f"q{n}", "a": "a", "s": "x"} for n in range(8)]
    made = questions(task(), rows, (), "completion", Asked(shots=3))
    shown = (made[0].prompt or "").count(" = a!")
    assert shown == 3 and len(made) == 5
    asked = {(one.prompt or "").split("\n\n")[-1].removesuffix(" =") for one in made}
    assert all(f"{name} = a!" not in (made[0].prompt or "") for name in asked)


def test_more_examples_than_there_are_is_refused() -> None:
    with pytest.raises(BadInput, match="2 worked examples of x, not 5"):
        questions(task(), ROWS, DEV, "chat", Asked(shots=5))
    with pytest.raises(BadInput, match="leave no question"):
        questions(task(), ROWS, (), "chat", Asked(shots=8))


def test_two_rows_with_one_id_are_refused() -> None:
    with pytest.raises(BadInput, match="two rows with the id 'x'"):
        questions(task('id = "{s}"'), ROWS, (), "chat", Asked())


def test_the_digest_is_of_what_is_asked() -> None:
    none, one = (questions(task(), ROWS, DEV, "chat", Asked(shots=shots))[0].digest for shots in (0, 1))
    assert none != one and none == questions(task(), ROWS, DEV, "chat", Asked())[0].digest
