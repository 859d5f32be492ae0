"""What `windlass check --full` predicts, against what then happens: 50 examples of a task, and a training run.

python bench/check/estimates.py [--task lists] [--recipe RECIPE.toml] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

WINDLASS = [sys.executable, "-P", "-m", "windlass"]


def check(*words: str) -> dict[str, Any]:
    done = subprocess.run([*WINDLASS, "check", *words, "--full", "--json"], capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["estimates"]


def seconds(*words: str) -> float:
    began = time.monotonic()
    subprocess.run([*WINDLASS, *words], capture_output=True, check=True)
    return time.monotonic() - began


SEEN: dict[str, list[tuple[float, float]]] = {}


def show(what: str, predicted: float, measured: float) -> None:
    print(f"{what:<24} predicted {predicted:7.1f} s, took {measured:7.1f} s: {predicted / measured - 1:+.0%}", flush=True)
    SEEN.setdefault(what, []).append((predicted, measured))


def show_all() -> None:
    """On a busy machine one round says little: its speed changes between the prediction and the run."""
    for what, rounds in SEEN.items():
        predicted, measured = (sum(numbers) for numbers in zip(*rounds, strict=True))
        print(f"{what}, all {len(rounds)} rounds: {predicted:.1f} s and {measured:.1f} s: {predicted / measured - 1:+.0%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="lists")
    parser.add_argument("--recipe")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            predicted = check("tiny-glm", "--tasks", options.task)["examples"]["50"]["seconds"]
            words = ("eval", "tiny-glm", "--tasks", options.task, "--num-examples", "50", "--results-dir", f"{folder}/results")
            show(f"50 of {options.task}", predicted, seconds(*words))
            if options.recipe:
                training = check(options.recipe, "--folder", folder)["training"]
                took = seconds("train", "run", options.recipe, "--out", f"{folder}/run")
                show(f"{training['steps']} steps", training["seconds"], took)
    show_all()


if __name__ == "__main__":
    main()
