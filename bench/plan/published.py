"""Published speeds of inference against the planner: by kind, median absolute error, bias and the share of rows inside the 80 % interval.

    python bench/plan/published.py            # the table, fitted and left-out sources apart
    python bench/plan/published.py --rows     # and every row
    python bench/plan/published.py --json

The rows and their sources are in bench/plan/published/inference.toml; nothing is measured here, and everything runs in this process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.core.hardware.parse import parse_hardware
from windlass.core.model import ModelSpec
from windlass.core.plan import Plan, Speed
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme, scheme
from windlass.errors import Error, UnknownName
from windlass.model.families import describe
from windlass.model.families import rules as rules_of
from windlass.open.resolve import describe_model
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.search.request import PlanRequest

DATA = tuple(Path(__file__).parent / "published" / name for name in ("inference.toml", "further.toml"))

LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip

# Bits per weight of files that no scheme of core/scheme.py is called after (llama.cpp's quantize --help; ik_llama.cpp's for iq5_k).
GGUF_BITS = {
    "ud_q2_k_xl_211": 2.7, "ud_iq2_m": 2.7, "iq4_xs": 4.25, "q4_0": 4.5, "q4_k_m": 4.85, "iq5_k": 5.5, "q8_0": 8.5, "mlx4_5": 4.5, "mlx4_64": 4.5,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    number: int
    kind: str
    source: str
    fitted: bool
    variant: bool
    published: float
    predicted: float
    low: float
    high: float
    ceiling: float
    error: float
    inside: bool
    fits: bool
    note: str = ""


def rows() -> list[dict[str, Any]]:
    return [row for file in DATA for row in tomllib.loads(file.read_text())["row"]]


def as_stored(name: str, kv: str) -> Scheme:
    """A file's type as a scheme: by its own name where there is one, else of so many bits, the head included."""
    try:
        return scheme(name, kv=kv)
    except UnknownName:
        bits = GGUF_BITS[name]
        whole = int(bits)
        return Scheme(name=name, bits=whole, group=128, scale_bytes=round((bits - whole) * 16), kv=kv, quantize_head=True)


def shape(name: str) -> tuple[ModelSpec, tuple[Rule, ...]]:
    """A known model, or one of further.toml: a Llama of its own size."""
    own = tomllib.loads(DATA[1].read_text())["models"].get(name)
    if own is None:
        found = describe_model(name)
        return found.spec, found.rules
    spec = describe({**LLAMA, **own}, name)
    return spec, rules_of(spec)


def plan_row(row: dict[str, Any]) -> Plan:
    spec, rules = shape(row["model"])
    named = row["quant"] in ("auto", "bf16", "fp8", "int8", "int4")
    kv = row.get("kv", "bf16")
    return make_plan(
        PlanRequest(
            spec=spec,
            rules=rules,
            hardware=parse_hardware(row["on"]),
            context_tokens=row["context"],
            concurrency=row.get("concurrency"),
            goal=row.get("goal", "latency"),
            engine=row["engine"] if row["engine"] != "dllama" else "windlass",
            quant=row["quant"] if named else "auto",
            stored=None if named else as_stored(row["quant"], kv),
            kv=kv,
            pins={name: row[name] for name in ("tp", "pp", "ep", "dp") if name in row},
            prompt_tokens=row.get("prompt"),
            new_tokens=row.get("new"),
            requests=row.get("requests", 0),
            spread=row.get("spread", False),
        )
    )


def figure(row: dict[str, Any], plan: Plan, speed: Speed) -> tuple[float, tuple[float, float]]:
    """The predicted figure and its interval, in the unit of what was published."""
    if row["metric"] == "kv_tokens":
        assert plan.kv_blocks is not None
        tokens = float(plan.kv_blocks.available * plan.kv_blocks.block_tokens)
        return tokens, (tokens * 0.9, tokens * 1.1)
    factor = 1 / len(parse_hardware(row["on"]).nodes) if row.get("per_node") else 1.0
    if row["metric"] == "decode":
        value, ends = speed.decode_tokens_per_second, speed.decode_range
    elif row["metric"] == "prefill":
        value, ends = speed.prefill_tokens_per_second, speed.prefill_range
    else:
        value, ends = speed.sustained_tokens_per_second, speed.sustained_range
        if row["metric"] == "total":
            factor *= (row["prompt"] + row["new"]) / row["new"]
    return value * factor, (ends[0] * factor, ends[1] * factor)


def outcome(row: dict[str, Any]) -> Outcome:
    known = {key: row.get(key, False) for key in ("number", "kind", "source", "fitted", "variant")}
    published = float(row.get("published", 0.0))
    try:
        plan = plan_row(row)
    except Error as error:
        return Outcome(
            **known,
            published=published,
            predicted=0,
            low=0,
            high=0,
            ceiling=0,
            error=-1,
            inside=False,
            fits=False,
            note=str(error),
        )
    if not plan.fits or plan.speed is None:
        note = f"short {plan.short_bytes / 2**30:.1f} GiB" if not plan.fits else "no speed predicted"
        return Outcome(
            **known, published=published, predicted=0, low=0, high=0, ceiling=0, error=-1, inside=False, fits=plan.fits, note=note
        )
    value, (low, high) = figure(row, plan, plan.speed)
    per = len(parse_hardware(row["on"]).nodes) if row.get("per_node") else 1
    ceiling = plan.speed.decode_ceiling_tokens_per_second / per if row["metric"] in ("decode", "sustained") else 0.0
    error = value / published - 1 if published else 0.0
    note = f"{plan.engine} {plan.scheme.name} {plan.layout} n={plan.workload.concurrency}"
    return Outcome(
        **known, published=published, predicted=value, low=low, high=high, ceiling=ceiling, error=error, inside=low <= published <= high,
        fits=True, note=note,
    )  # fmt: skip


def outcomes(only: str = "") -> list[Outcome]:
    return [outcome(row) for row in rows() if row["kind"].startswith(only)]


def summary(found: list[Outcome]) -> list[dict[str, Any]]:
    """By kind and part; rows that only restate another are not counted."""
    made: list[dict[str, Any]] = []
    for kind in dict.fromkeys(one.kind for one in found):
        for part in (True, False):
            these = [one for one in found if one.kind == kind and one.fitted is part and not one.variant]
            if not these:
                continue
            refused = sum(not one.fits for one in these)
            errors = [one.error for one in these if one.fits and one.published]
            made.append(
                {
                    "kind": kind, "part": "fitted" if part else "left out", "rows": len(these), "refused": refused,
                    "median_absolute_error": statistics.median(map(abs, errors)) if errors else None,
                    "bias": statistics.median(errors) if errors else None,
                    "inside": sum(one.inside for one in these) / len(these) if errors else None,
                }
            )  # fmt: skip
    return made


def _print_rows(found: list[Outcome]) -> None:
    print("| # | kind | fitted | published | predicted | error | interval | ceiling | source | plan |\n|" + "---|" * 10)
    for one in found:
        ends = f"{one.low:,.4g}-{one.high:,.4g}{'' if one.inside else ' outside'}"
        print(
            f"| {one.number} | {one.kind} | {'yes' if one.fitted else ''} | {one.published:,.4g} | {one.predicted:,.4g} | {one.error:+.0%} "
            f"| {ends} | {one.ceiling:,.4g} | {one.source[:40]} | {one.note} |"
        )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description="The planner against published speeds of inference.")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--only", default="", metavar="KIND", help="only kinds that begin so")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = outcomes(options.only)
    if options.json:
        print(json.dumps({"summary": summary(found), "rows": [asdict(one) for one in found]}))
        return
    if options.rows:
        _print_rows(found)
    print("| kind | part | rows | refused | median absolute error | bias | inside the interval |\n|" + "---|" * 7)
    for one in summary(found):
        shown = [
            f"{one[key]:+.0%}" if key == "bias" else f"{one[key]:.0%}"
            for key in ("median_absolute_error", "bias", "inside")
            if one[key] is not None
        ]
        print(f"| {one['kind']} | {one['part']} | {one['rows']} | {one['refused']} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
