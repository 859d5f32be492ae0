"""Small Python functions: what a call prints, and writing one from a description.

Answers are computed directly, not by running the generated code; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from windlass.model.bundled.tasks.lists import LETTERS, WORDS
from windlass.model.bundled.tasks.problem import Maker, Problem

NAMES, VALUES, LISTS, TEXTS = (
    ("f", "g", "h", "func", "solve"),
    ("x", "n", "a", "value"),
    ("xs", "items", "values"),
    ("s", "word", "text"),
)


class PythonFunction(NamedTuple):
    body: str
    """{v} is the argument."""
    argument: Any
    result: Any


def _text(random: Random) -> str:
    return random.choice(WORDS) if random.random() < 0.7 else "".join(random.choices(LETTERS, k=random.randrange(2, 6)))


def _list(random: Random, most: int = 6, limit: int = 30) -> list[int]:
    return [random.randrange(limit) for _ in range(random.randrange(2, most + 1))]


# --- of a number


def _linear(random: Random) -> PythonFunction:
    factor, offset, x = random.randrange(2, 10), random.randrange(21), random.randrange(21)
    if random.random() < 0.5:
        return PythonFunction(f"return {factor} * {{v}} + {offset}", x, factor * x + offset)
    return PythonFunction(f"return {{v}} * {factor} - {offset}", x, x * factor - offset)


def _one_step(random: Random) -> PythonFunction:
    x, k = random.randrange(100), random.randrange(1, 50)
    sign = random.choice("+-")
    return PythonFunction(f"return {{v}} {sign} {k}", x, x + k if sign == "+" else x - k)


def _remainder(random: Random) -> PythonFunction:
    x, k = random.randrange(60), random.randrange(2, 11)
    if random.random() < 0.5:
        return PythonFunction(f"return {{v}} % {k}", x, x % k)
    return PythonFunction(f"return {{v}} // {k}", x, x // k)


def _branch(random: Random) -> PythonFunction:
    x, limit, more, less = (random.randrange(30) for _ in range(4))
    body = f"if {{v}} > {limit}:\n        return {{v}} + {more}\n    return {{v}} - {less}"
    return PythonFunction(body, x, x + more if x > limit else x - less)


def _truth(random: Random) -> PythonFunction:
    x, k = random.randrange(50), random.randrange(50)
    if random.random() < 0.5:
        return PythonFunction("return {v} % 2 == 0", x, x % 2 == 0)
    sign = random.choice("<>")
    return PythonFunction(f"return {{v}} {sign} {k}", x, x < k if sign == "<" else x > k)


def _loop(random: Random) -> PythonFunction:
    times, step, start = random.randrange(1, 8), random.randrange(1, 10), random.randrange(10)
    body = f"total = {start}\n    for _ in range({{v}}):\n        total += {step}\n    return total"
    return PythonFunction(body, times, start + times * step)


# --- of a list


def _of_list(random: Random) -> PythonFunction:
    items = _list(random)
    ways: tuple[tuple[str, Callable[[list[int]], Any]], ...] = (
        ("return sorted({v})", sorted),
        ("return {v}[::-1]", lambda xs: xs[::-1]),
        ("return max({v})", max),
        ("return min({v})", min),
        ("return len({v})", len),
        ("return {v}[0]", lambda xs: xs[0]),
        ("return {v}[-1]", lambda xs: xs[-1]),
        ("return {v}[1:]", lambda xs: xs[1:]),
        ("return {v}[:2]", lambda xs: xs[:2]),
        ("return {v} + {v}", lambda xs: xs + xs),
    )
    body, result = random.choice(ways)
    return PythonFunction(body, items, result(items))


def _sum(random: Random) -> PythonFunction:
    items = _list(random, most=4, limit=20)
    return PythonFunction("return sum({v})", items, sum(items))


def _each(random: Random) -> PythonFunction:
    items, k = _list(random, most=5, limit=20), random.randrange(2, 6)
    way = random.randrange(3)
    if way == 0:
        return PythonFunction(f"return [i * {k} for i in {{v}}]", items, [i * k for i in items])
    if way == 1:
        return PythonFunction(f"return [i + {k} for i in {{v}}]", items, [i + k for i in items])
    limit = random.randrange(3, 17)
    return PythonFunction(f"return [i for i in {{v}} if i > {limit}]", items, [i for i in items if i > limit])


def _contains(random: Random) -> PythonFunction:
    items = _list(random)
    item = random.choice(items) if random.random() < 0.5 else random.randrange(30)
    return PythonFunction(f"return {item} in {{v}}", items, item in items)


# --- of a text


def _of_text(random: Random) -> PythonFunction:
    text, times = _text(random), random.randrange(2, 4)
    ways: tuple[tuple[str, Callable[[str], Any]], ...] = (
        ("return {v}.upper()", str.upper),
        ("return {v}[::-1]", lambda s: s[::-1]),
        ("return len({v})", len),
        ("return {v}[0]", lambda s: s[0]),
        ("return {v}[-1]", lambda s: s[-1]),
        (f"return {{v}} * {times}", lambda s: s * times),
        ('return {v} + "s"', lambda s: s + "s"),
        ("return list({v})", list),
        ("return {v}.capitalize()", str.capitalize),
    )
    body, result = random.choice(ways)
    return PythonFunction(body, text, result(text))


_FUNCTIONS: tuple[tuple[Callable[[Random], PythonFunction], tuple[str, ...]], ...] = (
    (_linear, VALUES),
    (_one_step, VALUES),
    (_remainder, VALUES),
    (_branch, VALUES),
    (_truth, VALUES),
    (_loop, VALUES),
    (_of_list, LISTS),
    (_of_list, LISTS),
    (_sum, LISTS),
    (_each, LISTS),
    (_contains, LISTS),
    (_of_text, TEXTS),
    (_of_text, TEXTS),
)
ASK = ("{}", "{}", "What does this print?\n\n{}", "What is the output?\n\n{}")


def function(random: Random) -> Problem:
    make, names = random.choice(_FUNCTIONS)
    made = make(random)
    name, argument = random.choice(NAMES), random.choice(names)
    value = f'"{made.argument}"' if isinstance(made.argument, str) else repr(made.argument)
    code = f"def {name}({argument}):\n    {made.body.format(v=argument)}\n\nprint({name}({value}))"
    return Problem("python", f"{made.body} {value}", random.choice(ASK).format(code), str(made.result))


# --- writing one

_ORDERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("adds {k} to {v}", "return {v} + {k}", VALUES),
    ("subtracts {k} from {v}", "return {v} - {k}", VALUES),
    ("multiplies {v} by {k}", "return {v} * {k}", VALUES),
    ("returns the remainder of {v} divided by {k}", "return {v} % {k}", VALUES),
    ("says whether {v} is larger than {k}", "return {v} > {k}", VALUES),
    ("says whether {k} is in {v}", "return {k} in {v}", LISTS),
    ("returns the first {k} items of {v}", "return {v}[:{k}]", LISTS),
    ("adds {k} to each item of {v}", "return [i + {k} for i in {v}]", LISTS),
    ("multiplies each item of {v} by {k}", "return [i * {k} for i in {v}]", LISTS),
    ("keeps the items of {v} that are larger than {k}", "return [i for i in {v} if i > {k}]", LISTS),
    ("repeats {v} {k} times", "return {v} * {k}", TEXTS),
    ("returns the first {k} letters of {v}", "return {v}[:{k}]", TEXTS),
)


def write(random: Random) -> Problem:
    order, body, names = random.choice(_ORDERS)
    name, argument, k = random.choice(NAMES), random.choice(names), random.randrange(2, 100)
    asked = order.format(v=argument, k=k)
    prompt = f"Write a Python function {name}({argument}) that {asked}."
    return Problem("write", prompt, prompt, f"def {name}({argument}):\n    {body.format(v=argument, k=k)}")


MAKERS: dict[str, Maker] = {"python": function, "write": write}
