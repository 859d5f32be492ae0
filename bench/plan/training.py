"""Published training speeds and memory beside what the planner says of them. Run: python bench/plan/training.py [--rows] [--json]

Reads tests/data/training_rows.toml (PyTorch FSDP, adapters) and tests/data/published.toml (Megatron). Prints, for fitted and left-out
sources apart: median absolute error, bias (median signed error; + is too fast, or too much memory) and the share of rows inside the
printed 80 % interval. `--rows` prints every row.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from windlass.core.hardware.parse import parse_hardware  # noqa: E402
from windlass.core.hardware.spec import Hardware  # noqa: E402
from windlass.core.layout import training_groups  # noqa: E402
from windlass.core.model import Frozen, ModelSpec  # noqa: E402
from windlass.core.recipe.sections import LoraSection, OverlapSection  # noqa: E402
from windlass.core.rule import Rule  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.tasks.plan.training.intervals import intervals_of  # noqa: E402
from windlass.tasks.plan.training.job import TrainingJob  # noqa: E402
from windlass.tasks.plan.training.memory.footprint import CONTEXT_BYTES, device_bytes  # noqa: E402
from windlass.tasks.plan.training.time.candidates import predict_step  # noqa: E402
from windlass.units import GIB  # noqa: E402

ROWS = ROOT / "tests" / "data" / "training_rows.toml"
CONFIGS = ROOT / "src" / "windlass" / "model" / "families" / "configs"
DEGREES = ("tp", "cp", "pp", "ep")
NOT_FITTED = ("bloom", "mtnlg")
PLAIN = (
    "virtual_stages",
    "zero",
    "recompute",
    "compute",
    "gradients",
    "offload",
    "framework",
    "compile",
    "loss",
    "states",
    "shards",
)


class Row(Frozen):
    """One published row, made into what the planner takes."""

    name: str
    source: str
    part: str
    spec: ModelSpec
    rules: tuple[Rule, ...]
    hardware: Hardware
    job: TrainingJob
    tokens_per_second: float | None = None
    """Per device, as published."""
    memory_gib: float | None = None
    measure: str = "torch"

    @property
    def predicted_speed(self) -> float:
        return _speed(self)

    @property
    def predicted_gib(self) -> float:
        """As the source measured: the allocator's peak does not contain the CUDA context."""
        total = device_bytes(self.spec, self.rules, self.job).total
        return (total - (CONTEXT_BYTES if self.measure == "torch" else 0)) / GIB

    @property
    def fits(self) -> bool:
        return device_bytes(self.spec, self.rules, self.job).total <= self.hardware.devices[0].memory_bytes

    @property
    def speed_error(self) -> float | None:
        return None if self.tokens_per_second is None else self.predicted_speed / self.tokens_per_second - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.memory_gib is None else self.predicted_gib / self.memory_gib - 1


def _speed(row: Row) -> float:
    step = predict_step(row.spec, row.rules, row.hardware, row.job)
    return row.job.tokens_per_step / step.step_seconds / row.job.groups.world


@cache
def tables() -> dict[str, Any]:
    return tomllib.loads(ROWS.read_text(encoding="utf-8"))


@cache
def rows() -> tuple[Row, ...]:
    return (*(_row(_merged(row)) for row in tables()["rows"]), *_megatron_rows())


def _merged(row: dict[str, Any]) -> dict[str, Any]:
    shared = tables()["shared"].get(row["source"], {})
    lora = {**shared.get("lora", {}), **row.get("lora", {})}
    return {**shared, **row, **({"lora": lora} if lora else {})}


def _row(row: dict[str, Any]) -> Row:
    spec, tensor_rules = _model(row["model"])
    source = tables()["sources"][row["source"]]
    device, _, network = row["on"].partition("@")
    number = f" #{row['number']}" if "number" in row else ""
    about = " ".join(str(row[key]) for key in ("note", "recompute", "compute") if key in row)
    return Row(
        name=f"{row['model']} {row['world']}x{device} seq {row['sequence']} mb{row['micro']} {about}{number}",
        source=row["source"],
        part=source["part"],
        spec=spec,
        rules=tensor_rules,
        hardware=_hardware(device, network, row["world"]),
        job=_job(row),
        tokens_per_second=row.get("tokens_per_second"),
        memory_gib=row.get("memory_gib"),
        measure=row.get("measure", "torch"),
    )


def _job(row: dict[str, Any]) -> TrainingJob:
    degrees = {name: row.get(name, 1) for name in DEGREES}
    plain = {name: row[name] for name in PLAIN if name in row and name in TrainingJob.__struct_fields__}
    return TrainingJob(
        groups=training_groups(row["world"], **degrees),
        sequence_tokens=row["sequence"],
        global_batch=row["global_batch"],
        micro_batch=row["micro"],
        sequence_parallel=degrees["tp"] > 1,
        overlap=msgspec.convert(row.get("overlap", {}), OverlapSection),
        lora=msgspec.convert(row.get("lora", {}), LoraSection),
        **plain,
    )


@cache
def _hardware(device: str, network: str, world: int) -> Hardware:
    nodes = max(world // 8, 1)
    return parse_hardware(f"{nodes}x({min(world, 8)}x{device})@{network}" if nodes > 1 else f"{world}x{device}")


@cache
def _model(name: str) -> tuple[ModelSpec, tuple[Rule, ...]]:
    held = tables()["models"][name]
    if "config" in held:
        config = json.loads((CONFIGS / f"{held['config']}.json").read_text(encoding="utf-8"))
    else:
        config = _gpt(held) if held["kind"] == "gpt" else _llama(held)
    spec = describe(config, name)
    return spec, rules(spec)


def _gpt(shape: dict[str, int]) -> dict[str, Any]:
    sizes = {"n_embd": shape["h"], "n_layer": shape["layers"], "n_head": shape["heads"]}
    counts = {"n_positions": 2048, "vocab_size": shape["vocabulary"]}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {"model_type": "gpt2", "activation_function": "gelu", "layer_norm_epsilon": 1e-5, **sizes, **counts, **dropout}


def _llama(shape: dict[str, int]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": shape["h"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape.get("kv_heads", shape["heads"]),
        "intermediate_size": shape["ffn"],
        "vocab_size": shape["vocabulary"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def _megatron_rows() -> tuple[Row, ...]:
    """The runs of published.toml: fitted, but for two sources whose network is recalled, and DeepSpeed's rows of 2020."""
    module = _published()
    made = list[Row]()
    for run in module.runs():
        job = run.job
        rate = job.tokens_per_step / run.published_seconds / job.groups.world
        name = f"{run.row['model']} {job.groups.world}x{run.row['on']} {module.layout_text(run)} {run.row.get('note', '')}"
        made.append(
            Row(
                name=name,
                source=run.row["source"],
                part="left_out" if run.row["source"] in NOT_FITTED or job.framework == "deepspeed" else "fitted",
                spec=run.spec,
                rules=run.rules,
                hardware=run.hardware,
                job=job,
                tokens_per_second=rate,
            )
        )
    return tuple(made)


@cache
def _published() -> ModuleType:
    where = Path(__file__).with_name("published_training.py")
    found = importlib.util.spec_from_file_location("bench_published", where)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules.setdefault("bench_published", module)
    found.loader.exec_module(module)
    return module


class Summary(Frozen):
    what: str
    part: str
    source: str
    count: int
    median_error: float
    bias: float
    inside: float
    """Share of rows inside the 80 % interval."""


def summaries() -> list[Summary]:
    made = list[Summary]()
    for what in ("speed", "memory"):
        for part in ("fitted", "left_out"):
            chosen = [row for row in rows() if row.part == part and _error(row, what) is not None]
            sources = dict.fromkeys(row.source for row in chosen)
            for source in (*sources, "all"):
                some = [row for row in chosen if source in (row.source, "all")]
                made.append(_summary(what, part, source, some))
    return made


def _error(row: Row, what: str) -> float | None:
    return row.speed_error if what == "speed" else row.memory_error


def inside(row: Row, what: str) -> bool:
    found = intervals_of(row.spec, row.job, row.hardware.devices[0])
    return (found.speed if what == "speed" else found.memory).holds(1 / (1 + (_error(row, what) or 0.0)))


def _summary(what: str, part: str, source: str, some: list[Row]) -> Summary:
    errors = [_error(row, what) or 0.0 for row in some]
    return Summary(
        what=what,
        part=part,
        source=source,
        count=len(errors),
        median_error=statistics.median(map(abs, errors)),
        bias=statistics.median(errors),
        inside=sum(inside(row, what) for row in some) / len(some),
    )


def rows_table() -> str:
    lines = ["| source | row | tokens/s | predicted | error | GiB | predicted | error | fits |", "|---" * 9 + "|"]
    for row in rows():
        speed = (
            f"{row.tokens_per_second:,.0f} | {row.predicted_speed:,.0f} | {row.speed_error:+.0%}"
            if row.tokens_per_second
            else " | | "
        )
        held = (
            f"{row.memory_gib:.1f} | {row.predicted_gib:.1f} | {row.memory_error:+.0%}"
            if row.memory_gib
            else f" | {row.predicted_gib:.1f} | "
        )
        lines.append(f"| {row.source} | {row.name} | {speed} | {held} | {'yes' if row.fits else '**no**'} |")
    return "\n".join(lines)


def summary_table() -> str:
    lines = ["| what | part | source | rows | median error | bias | inside 80 % |", "|---" * 7 + "|"]
    lines += [
        f"| {s.what} | {s.part} | {s.source} | {s.count} | {s.median_error:.1%} | {s.bias:+.1%} | {s.inside:.0%} |"
        for s in summaries()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--json" in sys.argv:
        print(msgspec.json.encode(summaries()).decode())
    else:
        print(*([rows_table()] if "--rows" in sys.argv else []), summary_table(), sep="\n\n")
