"""A table of four models from journals of `windlass eval`: is the router better than the best of them, with no constant changed?

`python bench/route/four.py FOLDER SmolLM2-135M-Instruct.gguf`. tiny-glm; and SmolLM2 as three models of which each costs more: answers
cut at 8 tokens, whole answers, and with a worked example before the question. Tokens cost what a model's size says.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from specialists import PARAMETERS, windlass  # noqa: E402

ARMS = {"short": ["--max-tokens", "8"], "whole": [], "shots": ["--shots", "1"]}
TASKS = {"made": ("arithmetic,lists,functions", ["--num-examples", "25"]), "facts": (str(HERE / "facts.toml"), [])}


def main() -> None:
    folder, large = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    models = {"tiny-glm": ("tiny-glm", list[str]())}
    for name, options in ARMS.items():
        copied = folder / f"SmolLM2-{name}.gguf"
        if not copied.exists():
            shutil.copy(large, copied)
        models[copied.stem] = (str(copied), options)
    results: list[str] = []
    for name, (model, options) in models.items():
        for kind, (tasks, some) in TASKS.items():
            results.append(f"{name}-{kind}")
            again = ["--resume"] if (folder / results[-1]).exists() else [model, "--tasks", tasks, *some, *options]
            windlass(folder, "eval", *again, "--results-dir", results[-1])
    prices = [word for name in models for word in ("--price", f"{name}={_price(name)},{_price(name)}")]
    print(windlass(folder, "route", "fit", *results, *prices, "--floor", "1.0", "--out", "four.json"))


def _price(name: str) -> float:
    return PARAMETERS["tiny-glm" if name == "tiny-glm" else "SmolLM2"]


if __name__ == "__main__":
    main()
