"""The intervals of predictions of inference, from residuals: what src/windlass/tasks/plan/speed/spread.toml holds, and whether it is true.

    python bench/plan/spread.py            # by kind: width, rows, sources, and the share of rows that intervals from all other sources hold
    python bench/plan/spread.py --write    # writes spread.toml

Conformal: of n distances |ln(published / predicted)| the ceil(0.8 (n + 1))-th is the half width, so that a further row of the same kind lies
inside with a chance of 80 % however the distances are distributed. Where that rank is beyond n, the largest is widened. All rows were in view
while the model was made, so all widths are multiplied: of the rows of further.toml, before anything was changed for them, 69 % lay inside of what
the other rows gave, 73 % with 1.2, 82 % with 1.5. And machines of one kind differ: no interval of others' engines is narrower than that.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections import defaultdict
from dataclasses import dataclass
from math import ceil, exp, floor, log
from pathlib import Path
from types import ModuleType
from typing import Any

COVERAGE = 0.8
BEYOND = 1.3
"""On the largest distance, where rows are too few for the rank."""
IN_VIEW = 1.15
LEAST = 0.14
"""ln of 1.15: the same run on two machines of a kind differed by 7 to 26 % here (docs/reference/offload.md), by 10 % in prompts (benchmarks.md)."""
TARGET = Path(__file__).parents[2] / "src" / "windlass" / "tasks" / "plan" / "speed" / "spread.toml"
HEAD = """# Published over predicted, by kind of run: written by bench/plan/spread.py from the residuals of bench/plan/published.py and
# bench/plan/predicted_h200.py. docs/reference/predictions.md has the table.
"""
NOTES = {"own kernels": "our engine's kernels on an H200"}
FEW = 9
"""With fewer rows than this, the interval is as wide as the largest distance that was seen."""


@dataclass(frozen=True)
class Residual:
    kind: str
    source: str
    distance: float
    """ln(published / predicted)."""


def _bench(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def kind_of_row(row: dict[str, Any]) -> str:
    """As tasks/plan/speed/interval.py names it."""
    own = row["engine"] == "windlass" and "H200" in row["on"] and "RAM" not in row["kind"]
    if row["metric"] in ("sustained", "total") and row.get("concurrency", 2) > 1:
        return "burst" if row.get("spread") else "serving"
    if own:
        return "prompt own kernels" if row["metric"] == "prefill" else "own kernels"
    return row["kind"]


def residuals() -> list[Residual]:
    published, own = _bench("published"), _bench("predicted_h200")
    made = list[Residual]()
    for row in published.rows():
        found = published.outcome(row)
        if found.published and found.fits and not found.variant and row["metric"] != "kv_tokens":
            made.append(Residual(kind_of_row(row), found.source, log(found.published / found.predicted)))
    for run in own.measured():
        kind = "own kernels" if run.what == "decode" else "prompt own kernels"
        made.append(Residual(kind, f"{run.model} on an H200", -log(1 + run.error)))
    return made


def half_width(distances: list[float]) -> float:
    """Of an interval that holds a further one of them with a chance of 80 %."""
    ranked = sorted(map(abs, distances))
    rank = ceil(COVERAGE * (len(ranked) + 1))
    return ranked[rank - 1] if rank <= len(ranked) else ranked[-1] * BEYOND


def width(kind: str, found: list[Residual]) -> float:
    """The half width that is printed, as ln."""
    half = half_width([one.distance for one in found]) * IN_VIEW
    return half if "own" in kind else max(half, LEAST)


def by_kind(found: list[Residual]) -> dict[str, list[Residual]]:
    made = defaultdict[str, list[Residual]](list)
    for one in found:
        made[one.kind].append(one)
    return dict(made)


def held_by_others(found: list[Residual]) -> float:
    """The share of rows inside the interval that the other sources alone give; 1 source says nothing."""
    inside = 0
    for one in found:
        others = [other.distance for other in found if other.source != one.source]
        inside += not others or abs(one.distance) <= half_width(others)
    return inside / len(found)


def entries(found: list[Residual]) -> str:
    lines = [HEAD]
    for kind, these in by_kind(found).items():
        half = width(kind, these)
        ends = floor(100 * exp(-half)) / 100, ceil(100 * exp(half)) / 100
        lines.append(f'["{kind}"]\nlow = {ends[0]:.2f}\nhigh = {ends[1]:.2f}\nrows = {len(these)}')
        note = ", ".join(filter(None, (NOTES.get(kind, ""), "few rows" if len(these) < FEW else "")))
        lines.append((f'note = "{note}"\n' if note else "").rstrip("\n") + ("\n" if note else ""))
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Intervals of predictions, from residuals.")
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name}")
    options = parser.parse_args()
    found = residuals()
    if options.write:
        temporary = TARGET.with_suffix(".new")
        temporary.write_text(entries(found), encoding="utf-8")
        temporary.rename(TARGET)
    print("| kind | rows | sources | interval | inside | inside by other sources' interval |\n|" + "---|" * 6)
    for kind, these in by_kind(found).items():
        half = width(kind, these)
        inside = sum(abs(one.distance) <= half for one in these) / len(these)
        sources = len({one.source for one in these})
        ends = f"{exp(-half):.2f} to {exp(half):.2f}"
        print(f"| {kind} | {len(these)} | {sources} | {ends} | {inside:.0%} | {held_by_others(these):.0%} |")


if __name__ == "__main__":
    main()
