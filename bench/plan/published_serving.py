"""The planner against published serving throughput: prints a Markdown table with signed errors. `python bench/plan/published_serving.py`"""

from __future__ import annotations

import statistics
import tomllib
from pathlib import Path
from typing import Any

from windlass.core.hardware.parse import parse_hardware
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.inference.candidates import Candidate
from windlass.tasks.plan.inference.search.best import search
from windlass.tasks.plan.inference.search.request import PlanRequest

DATA = Path(__file__).parents[2] / "tests" / "data" / "published_serving.toml"


def predict(table: dict[str, Any], prompt: int, new: int) -> Candidate:
    known = find(table["model"])
    assert known is not None
    spec = spec_of(known)
    asked = PlanRequest(
        spec=spec,
        rules=rules(spec),
        hardware=parse_hardware(table["hardware"]),
        context_tokens=min(prompt + new, spec.context_tokens),
        goal="throughput",
        engine="vllm",
        quant=table["quant"],
        kv=table["kv"],
        pins={"tp": table["tp"]},
        prompt_tokens=prompt,
        new_tokens=new,
    )
    return search(asked).best


def main() -> None:
    seen: list[float] = []
    blind: list[float] = []
    print("| model | hardware | scheme | prompt / new | published | predicted | error | ceiling |")
    print("|---|---|---|---|---|---|---|---|")
    for table in tomllib.loads(DATA.read_text())["table"]:
        for prompt, new, published in table["rows"]:
            speed = predict(table, prompt, new).speed
            error = speed.sustained_tokens_per_second / published - 1
            (blind if table.get("blind") else seen).append(error)
            mark = " (blind)" if table.get("blind") else ""
            print(
                f"| {table['model']} | {table['hardware']} | {table['quant']} | {prompt} / {new} | {published:,.0f} "
                f"| {speed.sustained_tokens_per_second:,.0f} | {error:+.0%}{mark} | {speed.decode_ceiling_tokens_per_second:,.0f} |"
            )
    for name, errors in (("in view while the model was made", seen), ("added afterwards", blind)):
        absolute = statistics.median(map(abs, errors))
        print(
            f"\n{len(errors)} rows {name}: median error {statistics.median(errors):+.0%}, median absolute error {absolute:.0%}."
        )


if __name__ == "__main__":
    main()
