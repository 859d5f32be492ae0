"""A plan for the terminal: verdict, summary, memory, reasons, alternatives and cloud offers."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from windlass.cli.console import console
from windlass.cli.plan.cloud_table import cloud_table
from windlass.cli.plan.training_table import training_summary
from windlass.core.plan import DeviceMemoryPlan, DisaggregatedPlan, LoadPlan, Plan
from windlass.units import format_bytes, format_context, format_count, format_rate, format_seconds

ENDLESS = 1e6
"""Seconds: a queue that grows without end is written as more than this."""


def show(plan: Plan, saved: list[Path]) -> None:
    out = console()
    if plan.caution:
        out.print(f"[bold yellow]not run yet[/]: {plan.caution}; `--engine auto` recommends one that does")
    out.print(_verdict(plan))
    out.print(_summary(plan) if plan.train is None else training_summary(plan))
    if plan.step:
        out.print(_step_table(plan))
    out.print(_memory_table(plan))
    out.print(_reasons_table(plan))
    if plan.alternatives:
        out.print(_alternatives_table(plan))
    if plan.cloud:
        out.print(cloud_table(plan.cloud))
    if plan.would_fit:
        start = "What would fit" if not plan.fits else "What would fit without offloading"
        out.print(f"\n[bold]{start}[/]: " + "; ".join(plan.would_fit))
    for path in saved:
        out.print(f"saved: {path}")


def _verdict(plan: Plan) -> str:
    model, where = plan.model, plan.hardware
    name = f"[bold]{model.name}[/] ({format_count(model.parameters)}"
    name += f", {format_count(model.active_parameters)} active)" if model.active_parameters != model.parameters else ")"
    if not plan.fits:
        return f"{name} [bold red]does not fit[/] on {where}: {format_bytes(plan.short_bytes)} short ({plan.short_bytes:,} bytes)"
    slow = " with offloaded weights" if plan.memory.host_bytes or plan.memory.disk_bytes else ""
    return f"{name} [bold green]fits[/] on {where}{slow}"


def _summary(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    group = f", groups of {plan.scheme.group}" if plan.scheme.group else ""
    table.add_row("setup", f"{plan.engine}, {plan.scheme.name}{group}, {plan.layout}, KV in {plan.scheme.kv}")
    work = plan.workload
    lengths = f"{work.prompt_tokens:,} prompt tokens, {work.new_tokens:,} output tokens"
    table.add_row("workload", f"{work.concurrency:,} concurrent, {format_context(work.context_tokens)} context, {lengths}")
    speed = plan.speed
    if speed is not None:
        share = (
            speed.decode_tokens_per_second / speed.decode_ceiling_tokens_per_second
            if speed.decode_ceiling_tokens_per_second
            else 0
        )
        pace = f"{_ranged(speed.decode_tokens_per_second, speed.decode_range)} tokens/s predicted, {format_seconds(speed.step_seconds)} per step"
        ceiling = f"ceiling {format_rate(speed.decode_ceiling_tokens_per_second)} ({share:.0%} of it)"
        table.add_row("decode", f"{pace}, bound by {speed.bound_by}\n{ceiling}")
        first = f"time to first token {format_seconds(speed.time_to_first_token_seconds)}"
        table.add_row("prefill", f"{_ranged(speed.prefill_tokens_per_second, speed.prefill_range)} tokens/s; {first}")
        if work.concurrency > 1 or work.requests:
            burst = f" over a burst of {work.requests:,} requests" if work.requests else ""
            table.add_row(
                "output", f"{_ranged(speed.sustained_tokens_per_second, speed.sustained_range)} tokens/s with prompts{burst}"
            )
        table.add_row("interval", f"[dim]8 of 10 runs lie in it ({speed.basis})[/]")
        if plan.load is not None:
            table.add_row("load", _load_row(plan.load))
        if plan.disaggregated is not None:
            table.add_row("apart", _apart_row(plan.disaggregated))
    else:
        table.add_row("speed", "not predicted: memory plan only" if plan.fits else "not predicted: it does not fit")
    if plan.cost.usd_per_hour:
        per_million = f", ${plan.cost.usd_per_million_output_tokens:,.2f} per million tokens" if speed else ""
        table.add_row("price", f"${plan.cost.usd_per_hour:,.2f}/h{per_million} ({plan.cost.priced_at})")
    if speed is not None and plan.energy.watts:
        table.add_row(
            "energy",
            f"{plan.energy.watts:,.0f} W, {plan.energy.kg_co2_per_million_output_tokens:,.3g} kg CO2 per million tokens ({plan.energy.grid})",
        )
    return table


def _ranged(value: float, ends: tuple[float, float]) -> str:
    """`364, 300-390`: a prediction and where eight of ten runs lie."""
    return f"{format_rate(value)}, {format_rate(ends[0])}-{format_rate(ends[1])}" if ends[1] else format_rate(value)


def _apart_row(found: DisaggregatedPlan) -> str:
    """Prompts and decoding on machines of their own."""
    passing = f"{format_bytes(found.kv_bytes)} of KV cache a prompt in {format_seconds(found.transfer_seconds)}"
    if not found.within:
        kept = f"prefill at most {found.prefill.most_requests_per_second:.3g}/s a unit, decode {found.decode.most_requests_per_second:.3g}/s"
        return f"[red]no number of units keeps these limits[/]: {kept}; {passing}"
    pools = " + ".join(
        f"{pool.units} x ({name}: {pool.layout}, {pool.scheme}, at most {pool.most_requests_per_second:.3g}/s)"
        for name, pool in (("prefill", found.prefill), ("decode", found.decode))
    )
    first, between = format_seconds(found.time_to_first_token_seconds), format_seconds(found.time_per_token_seconds)
    return (
        f"{found.requests_per_second:g}/s need {pools}, {found.decode.engine}\n"
        f"first token {first}, of it {passing}; {between} between tokens, {found.in_flight:,.0f} in flight"
    )


def _load_row(load: LoadPlan) -> str:
    if load.within:
        verdict = f"{load.requests_per_second:g}/s fit: {load.in_flight:,.0f} in flight"
    else:
        verdict = f"[red]{load.requests_per_second:g}/s are too many[/]"
    times = f"first token {format_seconds(load.time_to_first_token_seconds)}, {format_seconds(load.time_per_token_seconds)} between tokens"
    shown = f", {times}" if load.time_to_first_token_seconds < ENDLESS else ", the queue grows without end"
    return f"{verdict}{shown}; at most {load.most_requests_per_second:.3g}/s"


def _step_table(plan: Plan) -> Table:
    table = Table(
        box=None, header_style="bold", pad_edge=False, title_justify="left", title="\na decode step", title_style="bold"
    )
    for name in ("part", "bytes", "GFLOP", "time", "share", ""):
        table.add_column(name, justify="left" if name in ("part", "") else "right")
    whole = sum(part.seconds for part in plan.step)
    for part in plan.step:
        reads = format_bytes(part.num_bytes) if part.num_bytes else ""
        flops = f"{part.flops / 1e9:,.1f}" if part.flops else ""
        table.add_row(
            part.name, reads, flops, format_seconds(part.seconds), f"{part.seconds / whole:.0%}", f"[dim]{part.waits}[/]"
        )
    return table


def _memory_table(plan: Plan) -> Table:
    title = "\nmemory of the fullest device" if plan.train else "\nmemory per device"
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title=title, title_style="bold")
    for name in ("device", "states" if plan.train else "weights", "KV", "activations", "overhead", "total", "of", "used"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for count, held in _grouped(plan.memory.per_device):
        used = held.total_bytes / held.capacity_bytes if held.capacity_bytes else 0
        style = "red" if used > 1 else ""
        table.add_row(
            f"{count} x {held.name}" if count > 1 else held.name,
            *(
                format_bytes(part)
                for part in (
                    held.weights_bytes,
                    held.kv_bytes,
                    held.activation_bytes,
                    held.overhead_bytes,
                    held.total_bytes,
                    held.capacity_bytes,
                )
            ),
            f"{used:.0%}",
            style=style,
        )
    if plan.memory.host_bytes:
        table.add_row("host memory", format_bytes(plan.memory.host_bytes))
    if plan.memory.disk_bytes:
        table.add_row("disk", format_bytes(plan.memory.disk_bytes))
    return table


def _grouped(memory: tuple[DeviceMemoryPlan, ...]) -> list[tuple[int, DeviceMemoryPlan]]:
    """(count, device) of equal devices."""
    counts: dict[DeviceMemoryPlan, int] = {}
    for held in memory:
        counts[held] = counts.get(held, 0) + 1
    return [(count, held) for held, count in counts.items()]


def _reasons_table(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, title_justify="left", title="\nreasons", title_style="bold")
    for reason in plan.reasons:
        table.add_row(reason.choice, reason.value, f"[dim]{reason.why}[/]")
    return table


def _alternatives_table(plan: Plan) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title="\nalternatives", title_style="bold")
    for name in ("layout", "scheme", "engine", "decode tokens/s", "prefill tokens/s", "free", ""):
        table.add_column(name, justify="right" if "tokens" in name or name == "free" else "left")
    for other in plan.alternatives:
        rates = (format_rate(rate) for rate in (other.decode_tokens_per_second, other.prefill_tokens_per_second))
        table.add_row(
            str(other.layout), other.scheme, other.engine, *rates, format_bytes(other.free_bytes), f"[dim]{other.why_not}[/]"
        )
    return table
