"""Output of `windlass bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from windlass.cli.console import console
from windlass.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from windlass.core.tiers.stats import TierStats
    from windlass.tasks.bench.report import BatchResult, BenchReport, ReportChange, SplitResult, TierResult

SPECULATION_NOTE = (
    "prompts are random tokens, and answers to them repeat themselves or mean nothing: what speculation gains on them says little"
)


def show(report: BenchReport, written: list[Path], changes: tuple[ReportChange, ...] = ()) -> None:
    out = console()
    weights = f"{report.scheme} {'random ' if report.random_weights else ''}weights".strip()
    out.print(
        f"[bold]{report.model}[/] ({format_count(report.parameters)}), {weights}, KV in {report.kv}, "
        f"on {report.device}{f', {report.num_threads} threads' if report.device == 'cpu' else ''}; ready in {format_seconds(report.start_seconds)}"
    )
    limits = report.limits
    out.print(
        f"{report.machine}: memory bandwidth {limits.read_bytes_per_second / 1e9:.1f} GB/s, "
        f"matmul {limits.matmul_flops / 1e9:,.0f} GFLOP/s in {limits.matmul_dtype} (measured in this run)"
    )
    first = report.runs[0]
    out.print(
        f"prompts of {first.prompt_tokens:,} tokens, {first.new_tokens:,} new tokens; percentages are of the machine's limits"
    )
    out.print(_runs(report) if report.split is None else _split_runs(report))
    if report.split is not None:
        out.print(_ranks(report.split))
        out.print(_against_the_plan(report, report.split))
    shares = [f"batch {run.batch} {run.python_share:.1%}" for run in report.runs if run.python_share is not None]
    if shares:
        out.print(f"share of a decode step outside kernels: {', '.join(shares)}")
    touched = [f"batch {run.batch} {run.experts_touched:.1f}" for run in report.runs if run.experts_touched is not None]
    if touched:
        out.print(f"experts read per layer and decode step: {', '.join(touched)}")
    out.print(_memory(report))
    if report.tiers is not None:
        for line in _tier_lines(report.tiers):
            out.print(line)
    if changes:
        out.print(_changes(changes))
    for path in written:
        out.print(f"wrote {path}")


COLUMNS = ("batch", "TTFT", "prefill", "prefill FLOP/s", "decode", "step", "bytes/step", "bandwidth", "decode FLOP/s")


def _runs(report: BenchReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for run in report.runs:
        table.add_row(*_row(run, report))
    return table


def _row(run: BatchResult, report: BenchReport) -> list[str]:
    limits = report.limits
    prefill, decode = run.prefill_flops_per_second / 1e9, run.decode_flops_per_second / 1e9
    return [
        str(run.batch),
        format_seconds(run.time_to_first_token_seconds),
        f"{format_rate(run.prefill_tokens_per_second)} tok/s",
        f"{prefill:,.0f} GFLOP/s, {run.prefill_flops_share(limits):.0%}",
        f"{format_rate(run.decode_tokens_per_second)} tok/s",
        _step(run),
        f"{format_bytes(run.step_weight_bytes)} + {format_bytes(run.step_kv_bytes)} KV",
        f"{run.read_bytes_per_second / 1e9:.1f} GB/s, {run.read_share(limits):.0%}",
        f"{decode:,.0f} GFLOP/s, {run.decode_flops_share(limits):.0%}",
    ]


def _step(run: BatchResult) -> str:
    drafted = f", {run.tokens_per_step:.2f} tokens" if run.tokens_per_step > 1 else ""
    return format_seconds(run.step_seconds) + drafted


SPLIT_COLUMNS = ("batch", "TTFT", "prefill", "decode", "step")


def _split_runs(report: BenchReport) -> Table:
    """Without shares of the limits, which are those of one machine."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in SPLIT_COLUMNS:
        table.add_column(name, justify="right")
    for run in report.runs:
        prefill, decode = format_rate(run.prefill_tokens_per_second), format_rate(run.decode_tokens_per_second)
        first = format_seconds(run.time_to_first_token_seconds)
        table.add_row(str(run.batch), first, f"{prefill} tok/s", f"{decode} tok/s", _step(run))
    return table


RANK_COLUMNS = ("rank", "machine", "compute", "wait", "transfer", "sent", "received")


def _ranks(split: SplitResult) -> Table:
    title = (
        f"{split.layout}, all-reduce in {'full precision' if split.sync == 'exact' else split.sync}; per step of the first batch"
    )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), title=title, title_justify="left")
    for name in RANK_COLUMNS:
        table.add_column(name, justify="left" if name == "machine" else "right")
    for one in split.ranks:
        times = (format_seconds(seconds) for seconds in (one.compute_seconds, one.waiting_seconds, one.wire_seconds))
        table.add_row(
            str(one.rank), one.node, *times, format_bytes(round(one.sent_bytes)), format_bytes(round(one.received_bytes))
        )
    return table


def _against_the_plan(report: BenchReport, split: SplitResult) -> str:
    alone = next((run for run in report.runs if run.batch == 1), None)
    if not split.predicted_tokens_per_second:
        return "no prediction for this layout"
    predicted = f"predicted {format_rate(split.predicted_tokens_per_second)} tokens/s for one sequence"
    if alone is None:
        return predicted
    share = alone.decode_tokens_per_second / split.predicted_tokens_per_second
    return f"{predicted}; measured {format_rate(alone.decode_tokens_per_second)} ({share:.0%})"


def _memory(report: BenchReport) -> str:
    held = report.memory
    text = f"memory: {format_bytes(held.resident_bytes)}"
    if held.over_plan is not None:
        assert held.planned_bytes is not None
        more = "more" if held.over_plan >= 0 else "less"
        text += f", {abs(held.over_plan):.1%} {more} than the {format_bytes(held.planned_bytes)} planned"
    text += f"; weights {format_bytes(held.weights.total)}, KV cache {format_bytes(held.kv_bytes)}"
    return f"{text}, peak while loading {format_bytes(held.loading_peak_bytes)}"


def _hits(stats: TierStats, *, beside_device: bool) -> str:
    """Uses of experts by where they were found."""
    if not beside_device:
        return f"{stats.expert_hits:,} found in memory, {stats.expert_misses:,} read from disk"
    read = f", {stats.expert_reads:,} read from disk" if stats.disk_bytes else ""
    return f"{stats.expert_hits:,} found on the device, {stats.expert_misses - stats.expert_reads:,} in host memory{read}"


def _tier_lines(tiers: TierResult) -> list[str]:
    stats = tiers.stats
    rate = stats.read_bytes_per_second or 0.0
    busy = stats.read_seconds / tiers.seconds if tiers.seconds else 0.0
    lines = [f"offload: {tiers.placement}"]
    if stats.hit_rate is not None:
        lines.append(f"experts: {_hits(stats, beside_device=bool(tiers.link_bytes_per_second))} ({stats.hit_rate:.1%} found)")
    if stats.expert_guesses:
        lines.append(
            f"guesses: {stats.expert_guessed_right / stats.expert_guesses:.0%} of {stats.expert_guesses:,} experts right, "
            f"{stats.expert_foreseen / max(stats.expert_misses, 1):.0%} of the misses read before they were chosen; "
            f"{format_bytes(stats.wasted_bytes)} fetched in vain"
        )
    if tiers.disk_bytes_per_second:
        lines.append(
            f"disk: {format_bytes(stats.read_bytes)} read at {rate / 1e9:.2f} GB/s, {tiers.read_share:.0%} of the "
            f"{tiers.disk_bytes_per_second / 1e9:.2f} GB/s that it reads by itself; reads in flight {min(busy, 1):.0%} of the time"
        )
    if tiers.link_bytes_per_second:
        lines.append(
            f"host memory: {tiers.link_bytes_per_second / 1e9:.1f} GB/s over the link beside "
            f"{tiers.cpu_bytes_per_second / 1e9:.1f} GB/s by the CPU"
        )
    return [*lines, f"predicted {format_seconds(tiers.predicted_step_seconds)} a step"]


def _changes(changes: tuple[ReportChange, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="compared with the earlier report", title_justify="left")
    table.add_column("")
    for name in ("before", "now", "improvement"):
        table.add_column(name, justify="right")
    for change in changes:
        colour = "green" if change.ratio > 1.02 else "red" if change.ratio < 0.98 else "dim"
        table.add_row(change.what, f"{change.old:,.4g}", f"{change.new:,.4g}", f"[{colour}]{change.ratio:.2f}x[/]")
    return table
