"""How answers are found and graded: tables of texts as models write them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.evaluate.tasks.catalog import builtin
from windlass.tasks.evaluate.tasks.extract import extract
from windlass.tasks.evaluate.tasks.grade import grade, grade_choice, program, value_of
from windlass.tasks.evaluate.tasks.questions import Question

pytestmark = pytest.mark.pure

NUMBERS = [
    # what other harnesses' patterns get wrong: the last digit, one digit, commas, bold, what follows
    ("The answer is 18", "18", "18"),
    ("The answer is 8", "8", "8"),
    ("The answer is 1,800", "1,800", "1,800"),
    ("The answer is **18**.", "18", "18"),
    ("The answer is $18.00.", "$18.00", "$18.00"),
    ("The answer is 18 dollars, i.e. 50% more.", "18", "50"),
    ("#### 42", "42", "42"),
    ("Answer: -7", "-7", "-7"),
    ("9 + 9 = 18", None, "18"),
    ("I do not know.", None, None),
    ("The answer is 3.\nWait. The answer is 4.", "4", "4"),
    ("She is 1.75 m", None, "1.75"),
    ("<think>The answer is 5</think>The answer is 6", "6", "6"),
]


@pytest.mark.parametrize(("text", "strict", "flexible"), NUMBERS)
def test_numbers(text: str, strict: str | None, flexible: str | None) -> None:
    found = extract(builtin()["gsm8k"], text, "chat")
    assert (found.strict, found.flexible) == (strict, flexible)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("B", "B", "B"),
        (" (C)", "C", "C"),
        ("Answer: D", "D", "D"),
        ("The answer is **A**, since ...", "A", "A"),
        ("I think option C fits best.", None, "C"),
        ("A force acts on B. So it is D.", None, "B"),
        ("None of these.", None, None),
        ("Because of D's law: Answer: B", "B", "B"),
    ],
)
def test_letters(text: str, strict: str | None, flexible: str | None) -> None:
    found = extract(builtin()["mmlu"], text, "chat")
    assert found.flexible == flexible
    assert found.strict == strict


CODE = "def f(x):\n    return x + 1"


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        (f"Here:\n```python\n{CODE}\n```\nDone.", CODE, CODE),
        (f"```\n{CODE}\n```\nand\n```python\nprint(f(1))\n```", CODE, CODE),
        (f"Sure!\n\n{CODE}\n\nprint(f(1))", None, f"{CODE}\n\n"),
        (f"```python\n{CODE}", CODE, CODE),
        ("    return x + 1", None, "    return x + 1"),
    ],
)
def test_code_of_a_chat(text: str, strict: str | None, flexible: str | None) -> None:
    found = extract(builtin()["mbpp"], text, "chat")
    assert (found.strict, found.flexible) == (strict, flexible)


def test_a_completion_is_code_as_it_is() -> None:
    assert extract(builtin()["humaneval"], "    return 1", "completion").strict == "    return 1"


def question(**fields: str) -> Question:
    return Question(task="t", id="1", messages=None, prompt="p", **fields)


@pytest.mark.parametrize(
    ("code", "made"),
    [
        ("    return 1", "def f():\n    '''x'''\n    return 1\n"),
        ("def f():\n    return 2", "def f():\n    '''x'''\n\n\ndef f():\n    return 2\n"),
    ],
)
def test_a_body_continues_what_was_asked(code: str, made: str) -> None:
    asked = question(body_of="def f():\n    '''x'''\n")
    assert program(asked, code) == made
    compile(program(asked, code), "x", "exec")


@pytest.mark.parametrize(
    ("found", "wanted", "passed"),
    [
        ("18", "18", True),
        ("18.0", "18", True),
        ("$1,800", "1800", True),
        ("17.99", "18", False),
        (None, "18", False),
        ("x", "18", False),
    ],
)
def test_numbers_are_compared_by_value(found: str | None, wanted: str, passed: bool) -> None:
    assert grade(builtin()["gsm8k"], question(answer=wanted), found, True).passed is passed


def test_exact_is_exact_and_flexible_forgives_case_and_punctuation() -> None:
    task, asked = builtin()["lists"], question(answer="a b c")
    assert [grade(task, asked, "A b c.", strict).passed for strict in (True, False)] == [False, True]
    assert grade(task, asked, " a b c\n", True).passed


def test_the_most_likely_choice_is_the_answer() -> None:
    assert grade_choice({" A": -2.0, " B": -1.0}, " B").passed
    assert not grade_choice({" A": -1.0, " B": -1.0}, " B").passed  # of equal ones the first, as argmax


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_a_number_survives_how_it_is_written(value: Decimal) -> None:
    assert value_of(f"${value:,}") == value == value_of(f" {value}.")
