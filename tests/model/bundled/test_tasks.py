"""Generated tasks: answers are right, the seed decides, and what is held out is never trained on."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from random import Random

import pytest

from windlass.errors import UnknownName
from windlass.model.bundled.tasks import HELD_OUT, MAKERS, SHARES, accuracy, draw, held_out, is_held_out, is_right, problems
from windlass.model.bundled.tasks.problem import Problem

pytestmark = pytest.mark.pure

SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "//"}


def some(task: str, count: int = 400) -> list[Problem]:
    random = Random(task)
    return [draw(random, task) for _ in range(count)]


@pytest.mark.parametrize("task", SIGNS)
def test_arithmetic_is_right(task: str) -> None:
    for problem in some(task):
        a, b = (int(number) for number in problem.key.split({"divide": "/"}.get(task, SIGNS[task][0])))
        assert int(problem.answer) in {eval(f"{a} {SIGNS[task]} {b}")}
        assert str(a) in problem.prompt and str(b) in problem.prompt


def test_what_functions_print_is_what_python_prints() -> None:
    for problem in some("python", 1500):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(problem.prompt[problem.prompt.index("def ") :], {})
        assert printed.getvalue().rstrip("\n") == problem.answer, problem.prompt


def test_functions_to_order_do_as_they_are_told() -> None:
    for problem in some("write", 300):
        space: dict[str, object] = {}
        exec(problem.answer, space)
        name = problem.prompt.split("function ")[1].split("(")[0]
        assert callable(space[name])


def items(problem: Problem) -> list[str]:
    return problem.key.split(" ")


@pytest.mark.parametrize("task", ["copy", "reverse", "sort"])
def test_lists_come_out_as_asked(task: str) -> None:
    for problem in some(task):
        if " " not in problem.answer:
            assert task == "copy" and problem.answer == problem.key
            continue
        given = items(problem)
        found = problem.answer.replace(",", "").split(" ")
        in_order = sorted(given) if given[0].isalpha() else [str(number) for number in sorted(map(int, given))]
        down = "down" in problem.prompt or "large to small" in problem.prompt
        expected = {"copy": given, "reverse": given[::-1], "sort": in_order[::-1] if down else in_order}
        assert found == expected[task]
        assert (", " in problem.prompt.split(": ", 1)[1]) == (", " in problem.answer)


def test_counting_is_right() -> None:
    for problem in some("count"):
        item, found, listed = problem.key.partition(" in ")
        expected = listed.split(" ").count(item) if found else len(problem.key.split(" "))
        assert int(problem.answer) == expected


def test_spelling_and_picking_and_comparing_are_right() -> None:
    for problem in some("spell"):
        way, word = problem.key.split(" ")
        assert problem.answer == (" ".join(word) if way == "spell" else word[::-1])
    for problem in some("pick"):
        which, listed = problem.key.split(" ", 1)
        numbers = [int(number) for number in listed.strip("[]").split(", ")]
        assert (
            int(problem.answer)
            == {"largest": max(numbers), "smallest": min(numbers), "first": numbers[0], "last": numbers[-1]}[which]
        )
    for problem in some("compare"):
        larger, pair = problem.key.split(":")
        assert int(problem.answer) == (max if larger == "True" else min)(map(int, pair.split(",")))


def test_the_seed_decides() -> None:
    assert list(problems(3, 1, 200)) == list(problems(3, 1, 200))
    assert list(problems(3, 1, 200)) != list(problems(3, 2, 200))
    assert list(problems(3, 1, 200)) != list(problems(4, 1, 200))
    assert held_out(20, 5) == held_out(20, 5)


def test_no_held_out_problem_is_trained_on() -> None:
    trained = {(problem.task, problem.key) for part in range(3) for problem in problems(0, part, 20_000)}
    held = held_out(40)
    assert all(is_held_out(problem) for problem in held)
    assert not any((problem.task, problem.key) in trained for problem in held)
    assert Counter(problem.task for problem in held) == dict.fromkeys(MAKERS, 40)
    assert len({(problem.task, problem.key) for problem in held}) == len(held)


def test_both_orders_of_a_sum_are_one_problem() -> None:
    random = Random(1)
    keys: dict[frozenset[str], set[str]] = {}
    for _ in range(5000):
        problem = MAKERS["add"](random)
        keys.setdefault(frozenset(problem.key.split("+")), set()).add(problem.key)
    assert all(len(found) == 1 for found in keys.values())


def test_about_so_many_are_held_out() -> None:
    random = Random(2)
    held = sum(is_held_out(MAKERS["add"](random)) for _ in range(20_000))
    assert 0.6 * HELD_OUT < held / 20_000 < 1.4 * HELD_OUT


def test_shares_are_kept() -> None:
    counted = Counter(problem.task for problem in problems(0, 0, 20_000))
    total = sum(SHARES.values())
    assert SHARES.keys() == MAKERS.keys()
    assert all(abs(counted[task] / 20_000 - share / total) < 0.01 for task, share in SHARES.items())


def test_answers_are_graded_exactly() -> None:
    problem = Problem("add", "12+35", "12 + 35 =", "47")
    assert is_right(problem, "47") and is_right(problem, " 47\n")
    assert not any(is_right(problem, answer) for answer in ("", "4 7", "47.", "The answer is 47", "470"))
    assert accuracy([problem, problem], ["47", "48"]) == {"add": (1, 2)}


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean add"):
        draw(Random(0), "ad")
