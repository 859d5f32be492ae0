"""A training plan as a person reads it."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from windlass.core.plan import Plan
from windlass.units import format_bytes, format_count, format_rate, format_seconds


def training_summary(plan: Plan) -> Table:
    train = plan.train
    assert train is not None
    job: dict[str, Any] = train["job"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    groups = train["layout"]
    degrees = " ".join(f"{name}={groups[name]}" for name in ("tp", "cp", "pp", "ep", "dp") if groups[name] > 1) or "one device"
    virtual = f", {job['virtual_stages']} virtual stages" if job["virtual_stages"] > 1 else ""
    table.add_row(
        "how", f"{job['compute']}, {degrees}{virtual}, ZeRO {job['zero']}, recompute {job['recompute']}, {job['optimizer']}"
    )
    tokens = job["global_batch"] * job["sequence_tokens"]
    table.add_row(
        "step",
        f"{job['global_batch']:,} sequences of {job['sequence_tokens']:,} ({format_count(tokens)} tokens), micro-batch {job['micro_batch']}",
    )
    if plan.fits:
        _speed_rows(table, train, tokens)
    return table


def _speed_rows(table: Table, train: dict[str, Any], tokens: int) -> None:
    run, saved = train["run"], train["checkpoint"]
    seconds = train["step_seconds"]
    table.add_row(
        "predicted",
        f"{format_seconds(seconds)} a step, {format_rate(tokens / seconds)} tokens/s, MFU {train['model_flops_utilization']:.1%}",
    )
    table.add_row(
        "run",
        f"{format_count(run['tokens'])} tokens in {run['steps']:,} steps: {run['days']:,.1f} days, {run['days_with_failures']:,.1f} with failures",
    )
    money = f", ${run['usd']:,.0f}" if run["usd"] else ""
    table.add_row(
        "costs",
        f"{run['device_hours']:,.0f} device-hours{money}, {run['kwh'] / 1000:,.0f} MWh, {run['kg_co2'] / 1000:,.0f} t CO2",
    )
    interval = format_seconds(saved["interval_seconds"])
    table.add_row(
        "checkpoints",
        f"{format_bytes(saved['bytes'])} every {interval} (Young/Daly), {saved['goodput']:.1%} of the time makes progress",
    )
