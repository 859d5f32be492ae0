"""What `windlass plan` says of the runs in tests/data/measured_h200.toml: a Markdown table with errors. `python bench/plan/predicted_h200.py`"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.core.hardware.parse import parse_hardware
from windlass.core.model import ModelSpec
from windlass.core.plan import Speed
from windlass.model.families import describe, rules
from windlass.model.families.registry import find, published_config
from windlass.tasks.plan.inference.search.best import search
from windlass.tasks.plan.inference.search.request import PlanRequest

DATA = Path(__file__).parents[2] / "tests" / "data" / "measured_h200.toml"


@dataclass(frozen=True)
class Measured:
    model: str
    layers: int | None
    what: str
    """`decode` or `prefill`."""
    sequences: int
    prompt: int
    new: int
    tokens_per_second: float

    @property
    def speed(self) -> Speed:
        spec = shape_of(self.model, self.layers)
        asked = PlanRequest(
            spec=spec, rules=rules(spec), hardware=parse_hardware("1xH200"), context_tokens=self.prompt + self.new, engine="windlass",
            quant="int4", concurrency=self.sequences, prompt_tokens=self.prompt, new_tokens=self.new,
        )  # fmt: skip
        return search(asked).best.speed

    @property
    def predicted(self) -> float:
        speed = self.speed
        return speed.decode_tokens_per_second if self.what == "decode" else speed.prefill_tokens_per_second

    @property
    def error(self) -> float:
        return self.predicted / self.tokens_per_second - 1

    def __str__(self) -> str:
        cut = f", {self.layers} layers" if self.layers else ""
        return f"{self.model}{cut}, {self.what} of {self.sequences} x {self.prompt}"


def shape_of(name: str, layers: int | None) -> ModelSpec:
    known = find(name)
    assert known is not None
    config: dict[str, Any] = {key: value for key, value in published_config(known).items() if key != "quantization_config"}
    return describe(config | ({"num_hidden_layers": layers, "num_nextn_predict_layers": 0} if layers else {}), name)


def measured() -> Iterator[Measured]:
    for table in tomllib.loads(DATA.read_text())["table"]:
        name, layers = table["model"], table.get("layers")
        for sequences, rate in table["decode"].items():
            yield Measured(name, layers, "decode", int(sequences), table["prompt"], table["new"], rate)
        for tokens, rate in table.get("prefill", {}).items():
            yield Measured(name, layers, "prefill", 1, int(tokens), table["new"], rate)


def main() -> None:
    print("| model | what | measured | predicted | error | ceiling |\n|---|---|---|---|---|---|")
    for run in measured():
        name = f"{run.model}, {run.layers} layers" if run.layers else run.model
        what = f"{run.sequences} x {run.prompt + run.new // 2}" if run.what == "decode" else f"prompt of {run.prompt:,}"
        ceiling = f"{run.speed.decode_ceiling_tokens_per_second:,.0f}" if run.what == "decode" else ""
        print(f"| {name} | {what} | {run.tokens_per_second:,.0f} | {run.predicted:,.0f} | {run.error:+.0%} | {ceiling} |")


if __name__ == "__main__":
    main()
