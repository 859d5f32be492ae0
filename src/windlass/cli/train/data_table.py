"""The report of `windlass train data` for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from windlass.cli.console import console
from windlass.units import MB, format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from windlass.tasks.train.data.prepare.prepare import QualityReport

PROBLEMS = {
    "bad": "unreadable",
    "empty": "empty",
    "too_long": "too long",
    "unlearnable": "without assistant text to train on",
    "replacement": "with replacement characters",
    "mojibake": "with wrongly decoded text (mojibake)",
    "control": "with control characters",
}


def show_report(report: QualityReport, out: Path | None) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    for name, value in (*_amounts(report), *_repeated(report), *_wrong(report)):
        table.add_row(name, escape(value))
    if out is not None:
        held = f", {report.validation_documents:,} documents held out" if report.validation_documents else ""
        table.add_row("output", escape(f"{out}: {report.num_shards} shards{held}"))
    speed = f"{report.bytes / max(report.seconds, 1e-9) / MB:.1f} MB/s"
    table.add_row(
        "time",
        f"{format_seconds(report.seconds)}, {speed}, {format_rate(report.counts.tokens / max(report.seconds, 1e-9))} tokens/s",
    )
    console().print(table)


def _amounts(report: QualityReport) -> list[tuple[str, str]]:
    counts = report.counts
    chats = f", {counts.chats:,} chats" if counts.chats else ""
    learned = f", {counts.learned_tokens / max(counts.tokens, 1):.0%} trained on" if counts.chats else ""
    sizes = ", ".join(f"{tokens:,} at {percent} %" for percent, tokens in report.percentiles.items())
    rows = [
        ("sources", f"{report.files:,} files, {format_bytes(report.bytes)}"),
        ("documents", f"{counts.documents:,}{chats}"),
        (
            "tokens",
            f"{format_count(counts.tokens)}{learned}, {counts.characters / max(counts.tokens, 1):.2f} characters per token",
        ),
        ("lengths", f"{counts.shortest:,} to {counts.longest:,} tokens; {sizes}"),
    ]
    if report.skipped:
        endings = ", ".join(f"{number:,} {ending}" for ending, number in report.skipped[:6])
        rows.append(("skipped", f"{endings}: unknown file types"))
    return rows


def _repeated(report: QualityReport) -> list[tuple[str, str]]:
    found = report.repeats
    part = f" of the first {found.compared:,}" if found.compared < report.counts.documents else ""
    share = found.exact / max(found.compared, 1)
    return [
        ("duplicates", f"{found.exact:,} exact ({share:.1%}) and {found.near:,} near duplicates of an earlier document{part}")
    ]


def _wrong(report: QualityReport) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for what, text in PROBLEMS.items():
        if number := getattr(report.counts, what):
            examples = "; ".join(report.counts.examples.get(what, [])[:2])
            rows.append(("problem", f"{number:,} {text}: {examples}"))
    return rows
