"""Two small specialists, tiny-glm and SmolLM2, over a mix of their tasks: does a router beat the better one, at less cost?

`python bench/route/specialists.py FOLDER SmolLM2-135M-Instruct.gguf [QUESTIONS]`. Everything goes through the commands that users have. A
token costs as many millionths of a dollar as the model has millions of parameters, so costs are those of computing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PARAMETERS = {"tiny-glm": 17.6, "SmolLM2": 134.5}


def windlass(folder: Path, *words: str) -> str:
    print("$ windlass", *words, flush=True)
    found = subprocess.run([sys.executable, "-m", "windlass", *words], cwd=folder, check=True, stdout=subprocess.PIPE)
    return found.stdout.decode()


def main() -> None:
    folder, other = Path(sys.argv[1]), sys.argv[2]
    count = sys.argv[3] if len(sys.argv) > 3 else "100"
    folder.mkdir(parents=True, exist_ok=True)
    tasks = f"arithmetic,lists,{HERE / 'facts.toml'}"
    again = ["--resume"] if (folder / "answers").exists() else ["tiny-glm", other, "--tasks", tasks, "--num-examples", count]
    windlass(folder, "eval", *again, "--confidence", "--results-dir", "answers")
    names = sorted(path.parent.name for path in (folder / "answers").glob("*/journal.jsonl"))
    prices = [word for name in names for word in ("--price", f"{name}={_price(name)},{_price(name)}")]
    for floor in ("0.95", "1.0"):
        print(
            windlass(folder, "route", "fit", "answers", *prices, "--floor", floor, "--out", "router.json", "--page", "route.html")
        )
    models = "".join(f'[[models]]\nname = "{name}"\nat = "{"tiny-glm" if "tiny" in name else other}"\n' for name in names)
    first = next(name for name in names if "tiny" in name)
    (folder / "before.toml").write_text(f'router = "router.json"\nlog = "before.jsonl"\npolicy = {{kind = "best"}}\n{models}')
    cascade = f'[cascade]\nfirst = "{first}"\nhold_tokens = 32\n'
    (folder / "after.toml").write_text(
        f'router = "router.json"\nlog = "after.jsonl"\nsticky = false\npolicy = {{kind = "cheap"}}\n{models}{cascade}'
    )
    other_tasks = f"arithmetic,lists,{HERE / 'facts_other.toml'}"
    for name in ("before", "after"):
        made = windlass(
            folder,
            "eval",
            f"{name}.toml",
            "--tasks",
            other_tasks,
            "--num-examples",
            "60",
            "--seed",
            "7",
            "--results-dir",
            name,
            "--json",
        )
        rows = json.loads(made)["results"]
        right, asked = sum(row["num_correct"] for row in rows), sum(row["num_answers"] for row in rows)
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        cost = sum(line["cost"] for line in lines) / len(lines)
        print(
            f"{name}: {right} of {asked} right ({right / asked:.1%}), {cost:.3g} per answer as the table has it, answered by",
            _by(lines),
        )


def _price(name: str) -> float:
    return next(size for part, size in PARAMETERS.items() if part in name)


def _by(lines: list[dict[str, object]]) -> dict[object, int]:
    found: dict[object, int] = {}
    for line in lines:
        found[line["model"]] = found.get(line["model"], 0) + 1
    return found


if __name__ == "__main__":
    main()
