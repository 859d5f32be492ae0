"""Two small specialists, tiny-glm and SmolLM2, over a mix of their tasks: does a router beat the better one, at less cost?

`python bench/route/specialists.py FOLDER SmolLM2-135M-Instruct.gguf`. Everything goes through the commands that users have. A
token costs as many millionths of a dollar as the model has millions of parameters, so costs are those of computing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
NUM_SUMS, NUM_LIVE_SUMS = "10", "60"
"""Of each of two tasks; there are 66 facts."""
PARAMETERS = {"tiny-glm": 17.6, "SmolLM2": 134.5}


def windlass(folder: Path, *words: str) -> str:
    print("$ windlass", *words, flush=True)
    found = subprocess.run([sys.executable, "-m", "windlass", *words], cwd=folder, check=True, stdout=subprocess.PIPE)
    return found.stdout.decode()


def main() -> None:
    folder, other = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    sums = _answers(folder, "sums", "arithmetic,lists", ["--num-examples", NUM_SUMS], other)
    facts = _answers(folder, "facts", str(HERE / "facts.toml"), [], other)
    names = sorted(path.parent.name for path in (folder / sums).glob("*/journal.jsonl"))
    prices = [word for name in names for word in ("--price", f"{name}={_price(name)},{_price(name)}")]
    print(
        windlass(folder, "route", "fit", sums, facts, *prices, "--floor", "1.0", "--out", "router.json", "--page", "route.html")
    )
    path = json.loads(windlass(folder, "route", "report", "router.json", "--json"))["path"]
    best = max(path, key=lambda point: (point["score"], -point["cost"]))
    print(f"policy best, on held-out prompts: {best['score']:.1%} at {best['cost']:.3g} a answer, {best['share']}")
    models = "".join(f'[[models]]\nname = "{name}"\nat = "{"tiny-glm" if "tiny" in name else other}"\n' for name in names)
    first = next(name for name in names if "tiny" in name)
    begin = 'router = "router.json"\nsticky = false\n'
    (folder / "before.toml").write_text(f'{begin}log = "before.jsonl"\npolicy = {{kind = "best"}}\n{models}')
    cascade = f'[cascade]\nfirst = "{first}"\nhold_tokens = 32\n'
    (folder / "after.toml").write_text(f'{begin}log = "after.jsonl"\npolicy = {{kind = "cheap"}}\n{models}{cascade}')
    for name in ("before", "after"):
        _live(folder, name)


def _answers(folder: Path, name: str, tasks: str, options: list[str], other: str) -> str:
    again = ["--resume"] if (folder / name).exists() else ["tiny-glm", other, "--tasks", tasks, *options]
    windlass(folder, "eval", *again, "--confidence", "--results-dir", name)
    return name


def _live(folder: Path, name: str) -> None:
    """Through the router, with other questions than it was fitted to."""
    (folder / f"{name}.jsonl").unlink(missing_ok=True)
    right = asked = 0
    for tasks, options in (("arithmetic,lists", ["--num-examples", NUM_LIVE_SUMS]), (str(HERE / "facts_other.toml"), [])):
        where = ["--results-dir", f"{name}-{time.time():.0f}", "--json", "--seed", "7"]
        made = json.loads(windlass(folder, "eval", f"{name}.toml", "--tasks", tasks, *options, *where))
        right += sum(row["num_correct"] for row in made["results"])
        asked += sum(row["num_answers"] for row in made["results"])
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    print(f"{name}: {right} of {asked} right ({right / asked:.1%}), answered by", _by(lines))


def _price(name: str) -> float:
    return next(size for part, size in PARAMETERS.items() if part in name)


def _by(lines: list[dict[str, object]]) -> dict[object, int]:
    found: dict[object, int] = {}
    for line in lines:
        found[line["model"]] = found.get(line["model"], 0) + 1
    return found


if __name__ == "__main__":
    main()
