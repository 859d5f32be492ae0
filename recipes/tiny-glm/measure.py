"""Exact-match accuracy on held-out problems by task, for any model that Windlass runs, or a server.

python recipes/tiny-glm/measure.py out/tiny-glm/model --problems 200 --json accuracy.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from math import sqrt
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "src"))

from windlass import AsyncClient  # noqa: E402
from windlass.errors import Error  # noqa: E402
from windlass.model.bundled.tasks import accuracy, held_out, is_right  # noqa: E402
from windlass.model.bundled.tasks.problem import Problem  # noqa: E402

LONGEST_ANSWER = 80
AT_ONCE = 32


async def answers(model: str, problems: list[Problem]) -> list[str]:
    async with AsyncClient(model) as client:
        turns = asyncio.Semaphore(AT_ONCE)

        async def ask(problem: Problem) -> str:
            async with turns:
                return str(await client.chat(problem.prompt, temperature=0.0, max_tokens=LONGEST_ANSWER))

        return list(await asyncio.gather(*map(ask, problems)))


def interval(right: int, total: int) -> tuple[float, float]:
    """95 % Wilson interval."""
    share, z = right / total, 1.96
    middle, half = share + z * z / (2 * total), z * sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)


def show(counted: dict[str, tuple[int, int]]) -> None:
    print(f"{'task':10} {'right':>11}   share   95 % interval")
    rows = {**counted, "all": (sum(right for right, _ in counted.values()), sum(total for _, total in counted.values()))}
    for task, (right, total) in rows.items():
        low, high = interval(right, total)
        print(f"{task:10} {right:5} / {total:<5} {right / total:6.1%}   {low:.1%} to {high:.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Accuracy on held-out problems, by task.")
    parser.add_argument("model", help="a model's directory or name, or a server's address")
    parser.add_argument("--problems", type=int, default=200, help="of each task; 200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the numbers and the wrong answers to this file")
    given = parser.parse_args()
    problems = held_out(given.problems, given.seed)
    try:
        found = asyncio.run(answers(given.model, problems))
    except Error as error:
        print(f"measure.py: {error}", file=sys.stderr)
        return error.exit_code
    counted = accuracy(problems, found)
    show(counted)
    if given.json:
        pairs = [(problem, answer) for problem, answer in zip(problems, found, strict=True) if not is_right(problem, answer)]
        wrong = [
            {"task": each.task, "prompt": each.prompt, "expected": each.answer, "answered": answer} for each, answer in pairs
        ]
        given.json.write_text(
            json.dumps({"accuracy": counted, "seed": given.seed, "wrong": wrong}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
