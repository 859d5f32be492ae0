"""What `windlass check --full` predicts, against what then happens: evaluations, and a training run.

python bench/check/estimates.py [--model MODEL] [--task lists,functions] [--examples 50,400] [--recipe RECIPE.toml] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from windlass.runtime.machine.health.other_programs import OtherPrograms

WINDLASS = [sys.executable, "-P", "-m", "windlass"]
WITHIN = 0.2
QUIET = 0.15
"""Cores that other programs may use, so that a round counts as one of a quiet machine; 0.1 are seen with none at all."""


def check(*words: str) -> dict[str, Any]:
    done = subprocess.run([*WINDLASS, "check", *words, "--full", "--json"], capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["estimates"]


def seconds(*words: str) -> float:
    began = time.monotonic()
    subprocess.run([*WINDLASS, *words], capture_output=True, check=True)
    return time.monotonic() - began


SEEN: dict[str, list[tuple[dict[str, float], float]]] = {}


def show(what: str, predicted: dict[str, float], took: float, others: float) -> None:
    low, high = predicted["low"], predicted["high"]
    shown = f"{predicted['seconds']:6.1f} s ({low:.1f} to {high:.1f}), took {took:6.1f} s: {predicted['seconds'] / took - 1:+.0%}"
    print(f"{what:<24} {shown}{'' if low <= took <= high else ', outside'}; others used {others:.2f} cores", flush=True)
    SEEN.setdefault(f"{what}, {'quiet' if others <= QUIET else 'busy'}", []).append((predicted, took))


def show_all() -> None:
    """On a busy machine one round says little: its speed changes between the prediction and the run."""
    for what, rounds in SEEN.items():
        total, took = sum(one["seconds"] for one, _ in rounds), sum(measured for _, measured in rounds)
        near = sum(abs(one["seconds"] / measured - 1) <= WITHIN for one, measured in rounds)
        inside = sum(one["low"] <= measured <= one["high"] for one, measured in rounds)
        print(
            f"{what}: {near} of {len(rounds)} within {WITHIN:.0%}, {inside} inside the interval, in all {total / took - 1:+.0%}"
        )


def evaluate(model: str, task: str, numbers: list[int]) -> None:
    """One prediction, and then each number of examples for real."""
    others = OtherPrograms()
    predicted = check(model, "--tasks", task, "--examples", str(max(numbers)))["examples"]
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            words = ("eval", model, "--tasks", task, "--num-examples", str(number), "--results-dir", f"{folder}/results")
            show(f"{number} of {task}", predicted[str(number)], seconds(*words), others.cores())


def train(recipe: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        others = OtherPrograms()
        predicted = check(recipe, "--folder", folder)["training"]
        took = seconds("train", "run", recipe, "--out", f"{folder}/run")
        show(f"{predicted['steps']} steps", predicted, took, others.cores())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny-glm")
    parser.add_argument("--task", default="lists", help="names with commas; empty: none")
    parser.add_argument("--examples", default="50", help="50, 164 and one more, with commas")
    parser.add_argument("--recipe")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for _ in range(options.rounds):
        for task in filter(None, options.task.split(",")):
            evaluate(options.model, task, [int(word) for word in options.examples.split(",")])
        if options.recipe:
            train(options.recipe)
    show_all()


if __name__ == "__main__":
    main()
