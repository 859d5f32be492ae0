"""The bundled model answers what it was trained to, through the engine, alone and over two ranks that share its experts."""

from __future__ import annotations

import pytest

from windlass import Client
from windlass.model.bundled.tasks import accuracy, held_out

pytestmark = pytest.mark.cpu


def test_held_out_problems_are_answered() -> None:
    problems = held_out(4, seed=7)
    with Client("tiny-glm") as client:
        said = [str(client.chat(problem.prompt, temperature=0.0, max_tokens=80)) for problem in problems]
    counted = accuracy(problems, said)
    right, total = (sum(numbers) for numbers in zip(*counted.values(), strict=True))
    assert total == len(problems)
    assert right >= 0.9 * total, counted
