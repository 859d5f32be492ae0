"""A training plan for the terminal."""

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
    degrees = _degrees(train["layout"])
    virtual = f", {job['virtual_stages']} virtual stages" if job["virtual_stages"] > 1 else ""
    table.add_row(
        "setup", f"{job['compute']}, {degrees}{virtual}, ZeRO {job['zero']}, recompute {job['recompute']}, {job['optimizer']}"
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
    seconds, ranges = train["step_seconds"], train["intervals"]
    rate = ranges["tokens_per_second"]
    table.add_row(
        "predicted",
        f"{format_rate(tokens / seconds)} tokens/s, {format_rate(rate['low'])}-{format_rate(rate['high'])} (80 %);"
        f" {format_seconds(seconds)} per step, MFU {train['model_flops_utilization']:.1%}",
    )
    held = ranges["total_bytes"]
    table.add_row(
        "memory",
        f"{format_bytes(train['memory']['total_bytes'])}, {format_bytes(held['low'])}-{format_bytes(held['high'])} (80 %)"
        f" of {format_bytes(train['memory']['capacity_bytes'])} per device",
    )
    table.add_row(
        "run",
        f"{format_count(run['tokens'])} tokens in {run['steps']:,} steps: {_days(run['days'])}, {_days(run['days_with_failures'])} with failures"
        f" ({_days(ranges['days']['low'])} to {_days(ranges['days']['high'])})",
    )
    money = f", ${run['usd']:,.0f}" if run["usd"] else ""
    table.add_row("cost", f"{run['device_hours']:,.0f} device-hours{money}, {_energy(run['kwh'])}, {_mass(run['kg_co2'])} CO2")
    interval = format_seconds(saved["interval_seconds"])
    table.add_row("checkpoints", f"{format_bytes(saved['bytes'])} every {interval}, goodput {saved['goodput']:.1%}")
    for other in train["alternatives"]:
        table.add_row("alternative", _alternative(other))


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 2 else format_seconds(86_400 * days)


def _alternative(other: dict[str, Any]) -> str:
    virtual = f", {other['virtual_stages']} virtual stages" if other["virtual_stages"] > 1 else ""
    how = f"micro-batch {other['micro_batch']}, ZeRO {other['zero']}, recompute {other['recompute']}"
    return f"{_degrees(other['layout'])}{virtual}, {how}: {format_seconds(other['step_seconds'])} per step, {other['why_not']}"


def _degrees(groups: dict[str, int]) -> str:
    return " ".join(f"{name}={groups[name]}" for name in ("tp", "cp", "pp", "ep", "dp") if groups[name] > 1) or "one device"


def _energy(kwh: float) -> str:
    return f"{_digits(kwh / 1000)} MWh" if kwh >= 10_000 else f"{_digits(kwh)} kWh"


def _mass(kilograms: float) -> str:
    return f"{_digits(kilograms / 1000)} t" if kilograms >= 10_000 else f"{_digits(kilograms)} kg"


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
