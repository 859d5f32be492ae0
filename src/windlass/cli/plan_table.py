"""A plan as a person reads it: a verdict, what goes where, how quick, what it costs, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from windlass.cli.console import console
from windlass.core.plan import DeviceMemory, Plan
from windlass.units import format_bytes, format_context, format_count, format_seconds

SHOWN_OFFERS = 12


def show(plan: Plan, saved: list[Path]) -> None:
    out = console()
    out.print(_verdict(plan))
    if plan.train is not None:
        from windlass.cli.train_table import show_training

        show_training(plan)
    else:
        out.print(_summary(plan))
    out.print(_memory_table(plan))
    out.print(_reasons_table(plan))
    if plan.alternatives:
        out.print(_alternatives_table(plan))
    if plan.cloud:
        out.print(_cloud_table(plan))
    if plan.would_fit:
        start = "What would fit" if not plan.fits else "What would keep everything on the devices"
        out.print(f"\n[bold]{start}[/]: " + "; ".join(plan.would_fit))
    for path in saved:
        out.print(f"written: {path}")


def _verdict(plan: Plan) -> str:
    model, where = plan.model, plan.hardware
    name = f"[bold]{model.name}[/] ({format_count(model.parameters)}"
    name += f", {format_count(model.active_parameters)} active)" if model.active_parameters != model.parameters else ")"
    if not plan.fits:
        return f"{name} [bold red]does not fit[/] {where}: {format_bytes(plan.short_bytes)} short ({plan.short_bytes:,} bytes)"
    slow = " with weights outside the devices" if plan.memory.host_bytes or plan.memory.disk_bytes else ""
    return f"{name} [bold green]fits[/] {where}{slow}"


def _summary(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    group = f", groups of {plan.scheme.group}" if plan.scheme.group else ""
    table.add_row("how", f"{plan.engine}, {plan.scheme.name}{group}, {plan.layout}, KV in {plan.scheme.kv}")
    work = plan.workload
    table.add_row("for", f"{work.concurrency} at once, {format_context(work.context_tokens)} context, prompts of {work.prompt_tokens:,}, answers of {work.new_tokens:,}")
    speed = plan.speed
    if speed is not None:
        share = speed.decode_tokens_per_second / speed.decode_ceiling_tokens_per_second if speed.decode_ceiling_tokens_per_second else 0
        table.add_row(
            "decode",
            f"{speed.decode_tokens_per_second:,.4g} tokens/s predicted, {format_seconds(speed.step_seconds)} a step, bound by {speed.bound_by}"
            f"; ceiling {speed.decode_ceiling_tokens_per_second:,.4g} ({share:.0%} of it)",
        )
        table.add_row("prefill", f"{speed.prefill_tokens_per_second:,.4g} tokens/s; first token after {format_seconds(speed.time_to_first_token_seconds)}")
    else:
        table.add_row("speed", "not predicted: planned for memory only")
    if plan.cost.usd_per_hour:
        per_million = f", ${plan.cost.usd_per_million_output_tokens:,.2f} per million tokens" if speed else ""
        table.add_row("price", f"${plan.cost.usd_per_hour:,.2f}/h{per_million} ({plan.cost.priced_at})")
    if speed is not None and plan.energy.watts:
        table.add_row("energy", f"{plan.energy.watts:,.0f} W, {plan.energy.kg_co2_per_million_output_tokens:,.3g} kg CO2 per million tokens ({plan.energy.grid})")
    return table


def _memory_table(plan: Plan) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title="\nmemory per device", title_style="bold")
    for name in ("device", "weights", "KV", "activations", "overhead", "total", "of", "used"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for count, held in _grouped(plan.memory.per_device):
        used = held.total_bytes / held.capacity_bytes if held.capacity_bytes else 0
        style = "red" if used > 1 else ""
        table.add_row(
            f"{count} x {held.name}" if count > 1 else held.name,
            *(format_bytes(part) for part in (held.weights_bytes, held.kv_bytes, held.activation_bytes, held.overhead_bytes, held.total_bytes, held.capacity_bytes)),
            f"{used:.0%}",
            style=style,
        )
    if plan.memory.host_bytes:
        table.add_row("host memory", format_bytes(plan.memory.host_bytes))
    if plan.memory.disk_bytes:
        table.add_row("disk", format_bytes(plan.memory.disk_bytes))
    return table


def _grouped(memory: tuple[DeviceMemory, ...]) -> list[tuple[int, DeviceMemory]]:
    """Equal devices once, with how many there are."""
    counts: dict[DeviceMemory, int] = {}
    for held in memory:
        counts[held] = counts.get(held, 0) + 1
    return [(count, held) for held, count in counts.items()]


def _reasons_table(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, title_justify="left", title="\nwhy", title_style="bold")
    for reason in plan.reasons:
        table.add_row(reason.choice, reason.value, f"[dim]{reason.why}[/]")
    return table


def _alternatives_table(plan: Plan) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title="\nalso possible", title_style="bold")
    for name in ("layout", "scheme", "engine", "decode tokens/s", "prefill tokens/s", "free", ""):
        table.add_column(name, justify="right" if "tokens" in name or name == "free" else "left")
    for other in plan.alternatives:
        rates = (f"{rate:,.4g}" for rate in (other.decode_tokens_per_second, other.prefill_tokens_per_second))
        table.add_row(str(other.layout), other.scheme, other.engine, *rates, format_bytes(other.free_bytes), f"[dim]{other.why_not}[/]")
    return table


def _cloud_table(plan: Plan) -> Table:
    hidden = len(plan.cloud) - SHOWN_OFFERS
    more = f" (the {SHOWN_OFFERS} cheapest of {len(plan.cloud)}; all with --json)" if hidden > 0 else ""
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title=f"\noffers that run it{more}", title_style="bold")
    columns = _cloud_columns(plan.train is not None)
    for title, _ in columns:
        table.add_column(title, justify="left" if title in ("provider", "instance", "devices", "how", "priced") else "right")
    for offer in plan.cloud[:SHOWN_OFFERS]:
        table.add_row(*(render(offer) for _, render in columns))
    return table


def _cloud_columns(train: bool) -> list[tuple[str, Any]]:
    shared: list[tuple[str, Any]] = [
        ("provider", lambda one: one["provider"] + (" spot" if one["spot"] else "")),
        ("instance", lambda one: one["instance"]),
        ("devices", lambda one: f"{one['num_devices']}x{one['device']}"),
        ("$/h", lambda one: f"{one['usd_per_hour']:,.2f}"),
        ("priced", lambda one: one["priced_at"] + (" stale" if one["stale"] else "") + ("" if one["verified"] else " unverified")),
    ]
    if train:
        return [*shared, ("days", lambda one: f"{one['days']:,.1f}"), ("$ for the run", lambda one: f"{one['usd_total']:,.0f}"), ("storage $/month", lambda one: f"{one['storage_usd_per_month']:,.0f}")]
    return [
        *shared,
        ("how", lambda one: f"{one['scheme']}, {one['layout']}"),
        ("tokens/s", lambda one: f"{one['decode_tokens_per_second']:,.4g}"),
        ("$/M tokens", lambda one: f"{one['usd_per_million_output_tokens']:,.2f}"),
        ("storage $/month", lambda one: f"{one['storage_usd_per_month']:,.2f}"),
        ("fetch h", lambda one: f"{one['download_hours']:.2f}"),
        ("convert h", lambda one: f"{one['convert_hours']:.2f}"),
        ("buying pays after", lambda one: f"{one['break_even_hours']:,.0f} h" if one["break_even_hours"] else "-"),
    ]
