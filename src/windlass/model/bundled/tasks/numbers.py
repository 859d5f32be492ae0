"""Arithmetic on whole numbers of up to three digits."""

from __future__ import annotations

from random import Random

from windlass.model.bundled.tasks.problem import Maker, Problem, draw_digits

SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
WORDS = {
    "add": ("Add {a} and {b}.", "What is the sum of {a} and {b}?"),
    "subtract": ("Subtract {b} from {a}.", "What is {a} minus {b}?"),
    "multiply": ("Multiply {a} by {b}.", "What is {a} times {b}?"),
    "divide": ("Divide {a} by {b}.", "What is {a} divided by {b}?"),
}
PLAIN = (
    "{a} {sign} {b} =",
    "{a} {sign} {b}",
    "{a}{sign}{b}",
    "{a}{sign}{b}=",
    "What is {a} {sign} {b}?",
    "Compute {a} {sign} {b}.",
)


def _worded(random: Random, task: str, a: int, b: int) -> str:
    form = random.choice(PLAIN) if random.random() < 0.8 else random.choice(WORDS[task])
    return form.format(a=a, b=b, sign=SYMBOLS[task])


def add(random: Random) -> Problem:
    a, b = draw_digits(random), draw_digits(random)
    return Problem("add", f"{min(a, b)}+{max(a, b)}", _worded(random, "add", a, b), str(a + b))


def subtract(random: Random) -> Problem:
    """Differences may be negative, but less often."""
    a, b = draw_digits(random), draw_digits(random)
    if a < b and random.random() < 0.5:
        a, b = b, a
    return Problem("subtract", f"{a}-{b}", _worded(random, "subtract", a, b), str(a - b))


def multiply(random: Random) -> Problem:
    """By one digit; larger factors are left out, since a small model can only memorize them."""
    a, b = draw_digits(random), random.randrange(10)
    if random.random() < 0.3:
        a, b = b, a
    return Problem("multiply", f"{min(a, b)}*{max(a, b)}", _worded(random, "multiply", a, b), str(a * b))


def divide(random: Random) -> Problem:
    """Without remainder."""
    divisor, quotient = random.randrange(1, 10), draw_digits(random)
    a = divisor * quotient
    return Problem("divide", f"{a}/{divisor}", _worded(random, "divide", a, divisor), str(quotient))


COMPARE = {
    True: ("Which is larger, {a} or {b}?", "What is the larger of {a} and {b}?", "max({a}, {b})"),
    False: ("Which is smaller, {a} or {b}?", "What is the smaller of {a} and {b}?", "min({a}, {b})"),
}


def compare(random: Random) -> Problem:
    a, b = draw_digits(random), draw_digits(random)
    if random.random() < 0.3:  # close numbers are harder
        b = max(a + random.randrange(-12, 13), 0)
    larger = random.random() < 0.5
    prompt = random.choice(COMPARE[larger]).format(a=a, b=b)
    return Problem("compare", f"{larger}:{min(a, b)},{max(a, b)}", prompt, str(max(a, b) if larger else min(a, b)))


MAKERS: dict[str, Maker] = {"add": add, "subtract": subtract, "multiply": multiply, "divide": divide, "compare": compare}
