"""Published training runs beside what the planner says of them, as Markdown. Run: python bench/plan/published_training.py

Reads tests/data/published.toml. For every row: the FLOPs counted from the config against the published rate (where the source gives
both a time and a rate), the step time predicted from config and hardware alone against the published time, and whether the run fits
by our count of memory. Every run in the table did fit where it was run, so a "no" there is a gap in the count or in the row.
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from windlass.core.hardware.parse import parse_hardware  # noqa: E402
from windlass.core.hardware.spec import Hardware  # noqa: E402
from windlass.core.layout import training_groups  # noqa: E402
from windlass.core.model import Frozen, ModelSpec  # noqa: E402
from windlass.core.recipe.sections import OverlapSection  # noqa: E402
from windlass.core.rule import Rule  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.tasks.plan.training.job import TrainingJob  # noqa: E402
from windlass.tasks.plan.training.memory.footprint import DeviceBytes, device_bytes  # noqa: E402
from windlass.tasks.plan.training.time.candidates import predict_step  # noqa: E402
from windlass.tasks.plan.training.time.rates import flops_per_token  # noqa: E402
from windlass.tasks.plan.training.time.step import TrainingStepTime  # noqa: E402
from windlass.units import GIB  # noqa: E402

PUBLISHED = ROOT / "tests" / "data" / "published.toml"
CONFIGS = ROOT / "src" / "windlass" / "model" / "families" / "configs"


class Run(Frozen):
    """One published row, made into what the planner takes."""

    row: dict[str, Any]
    spec: ModelSpec
    rules: tuple[Rule, ...]
    hardware: Hardware
    job: TrainingJob

    @property
    def flops(self) -> float:
        """Per token, counted as the source counts."""
        counted = flops_per_token(
            self.spec,
            self.rules,
            self.job.sequence_tokens,
            recompute=self.job.recompute,
            causal=self.row["count"] == "causal",
            next_token=self.job.next_token,
        )
        return counted.hardware if self.row["count"] == "hardware" else counted.model

    def tflops(self, seconds: float) -> float:
        return self.flops * self.job.tokens_per_step / seconds / self.job.groups.world / 1e12

    @property
    def published_seconds(self) -> float:
        """The source's own time, or what its rate implies."""
        if "seconds" in self.row:
            return float(self.row["seconds"])
        if "tokens_per_second" in self.row:
            return self.job.tokens_per_step / self.row["tokens_per_second"] / self.job.groups.world
        return self.flops * self.job.tokens_per_step / (self.row["tflops"] * 1e12) / self.job.groups.world

    @property
    def counts_checked(self) -> bool:
        """The source gives a rate in FLOP/s and, independently, a time."""
        return "tflops" in self.row and ("seconds" in self.row or "tokens_per_second" in self.row)


@cache
def published() -> dict[str, Any]:
    return tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))


def runs() -> list[Run]:
    tables = published()
    return [make_run({**tables["shared"][row["source"]], **row}) for row in tables["rows"]]


def make_run(row: dict[str, Any]) -> Run:
    spec, tensor_rules = _model(row["model"], row.get("dropout"))
    device, _, network = row["on"].partition("@")
    hardware = _hardware(device, network, row["world"])
    return Run(row=row, spec=spec, rules=tensor_rules, hardware=hardware, job=_job(row))


@cache
def _hardware(device: str, network: str, world: int) -> Hardware:
    in_node = 64 if device.startswith("GB") else 8
    nodes = max(world // in_node, 1)
    return parse_hardware(f"{nodes}x({min(world, in_node)}x{device})@{network}" if nodes > 1 else f"{world}x{device}")


@cache
def _model(name: str, dropout: bool | None) -> tuple[ModelSpec, tuple[Rule, ...]]:
    held = published()["models"][name]
    if "config" in held:
        config = json.loads((CONFIGS / f"{held['config']}.json").read_text(encoding="utf-8"))
        spec = describe(config, name)
    else:
        spec = describe(gpt_config(held["h"], held["layers"], held["heads"]), name)
    if dropout is not None:
        spec = msgspec.structs.replace(spec, dropout=dropout)
    return spec, rules(spec)


def gpt_config(hidden: int, layers: int, heads: int, vocabulary: int = 51_200, positions: int = 2048) -> dict[str, Any]:
    """The Megatron papers' GPT: dropout everywhere, learned positions, tied head."""
    shape = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions, "vocab_size": vocabulary}
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    return {"model_type": "gpt2", "activation_function": "gelu", "layer_norm_epsilon": 1e-5, **shape, **dropout}


def _job(row: dict[str, Any]) -> TrainingJob:
    degrees = {name: row.get(name, 1) for name in ("tp", "cp", "pp", "ep", "expert_tp")}
    return TrainingJob(
        groups=training_groups(row["world"], **degrees),
        sequence_tokens=row["sequence"],
        global_batch=row["global_batch"],
        micro_batch=row["micro"],
        virtual_stages=row.get("virtual_stages", 1),
        schedule=row.get("schedule", "1f1b"),
        zero=row.get("zero", 1),
        sequence_parallel=row.get("sequence_parallel", degrees["tp"] > 1),
        recompute=row.get("recompute", "none"),
        flash_attention=row.get("flash", True),
        compute=row.get("compute", "bf16"),
        gradients=row.get("gradients", "fp32"),
        overlap=msgspec.convert(row.get("overlap", {}), OverlapSection),
        dispatch=row.get("dispatch", "all_to_all"),
        next_token=row.get("mtp", False),
        framework=row.get("framework", "megatron"),
    )


def predict(run: Run) -> TrainingStepTime:
    return predict_step(run.spec, run.rules, run.hardware, run.job)


def memory(run: Run) -> DeviceBytes:
    return device_bytes(run.spec, run.rules, run.job)


def fits(run: Run) -> bool:
    return memory(run).total <= run.hardware.devices[0].memory_bytes


def fits_text(run: Run) -> str:
    """`54 of 80`, GiB of the fullest device."""
    counted = f"{memory(run).total / GIB:.0f} of {run.hardware.devices[0].memory_bytes / GIB:.0f}"
    return counted if fits(run) else f"**no**: {counted}"


def layout_text(run: Run) -> str:
    groups = run.job.groups
    degrees = [
        ("tp", groups.tp),
        ("cp", groups.cp),
        ("pp", groups.pp),
        ("v", run.job.virtual_stages),
        ("ep", groups.ep),
        ("dp", groups.dp),
    ]
    return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)


def counts_table() -> str:
    lines = ["| run | published TFLOP/s | counted from config and published time | error |", "|---|---|---|---|"]
    for run in runs():
        if run.counts_checked:
            counted = run.tflops(run.published_seconds)
            name = f"{run.row['model']} {run.row.get('note', '')} {run.job.groups.world}x".replace("  ", " ")
            lines.append(f"| {name} | {run.row['tflops']} | {counted:.1f} | {counted / run.row['tflops'] - 1:+.2%} |")
    return "\n".join(lines)


def times_table(detail: bool = False) -> str:
    parts = ["compute", "memory", "tp", "ep", "cp", "bubble", "transfer", "dp", "optimizer"] if detail else []
    lines = [
        f"| source | model | devices | layout | published s | predicted s | error | fits, GiB |{''.join(f' {p} |' for p in parts)}"
    ]
    lines.append("|---" * (8 + len(parts)) + "|")
    for run in runs():
        step = predict(run)
        seconds, true = step.step_seconds, run.published_seconds
        device = run.row["on"].partition("@")[0]
        note = f" ({run.row['note']})" if "note" in run.row else ""
        more = (
            (step.compute, step.memory, step.tp, step.ep, step.cp, step.pp_bubble, step.pp_transfer, step.dp, step.optimizer)
            if detail
            else ()
        )
        what = f"{run.row['model']}{note}{', ' + run.job.recompute + ' recompute' if run.row['source'] == 'seqpar' else ''}"
        lines.append(
            f"| {run.row['source']} | {what} | {run.job.groups.world} {device} | {layout_text(run)} | {true:.4g} | {seconds:.4g} "
            f"| {seconds / true - 1:+.1%} | {fits_text(run)} |{''.join(f' {p / seconds:.0%} |' for p in more)}"
        )
    return "\n".join(lines)


def summary() -> str:
    lines: list[str] = []
    for source in published()["sources"]:
        errors = [predict(run).step_seconds / run.published_seconds - 1 for run in runs() if run.row["source"] == source]
        lines.append(
            f"{source}: {len(errors)} rows, median error {statistics.median(errors):+.1%}, from {min(errors):+.1%} to {max(errors):+.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(counts_table(), times_table(detail="--detail" in sys.argv), summary(), sep="\n\n")
