"""What `windlass train data` tells a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from windlass.cli.console import console
from windlass.units import MB, format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from windlass.train.data.prepare.prepare import Report

WRONG = {
    "bad": "cannot be read",
    "empty": "are empty",
    "too_long": "are too long",
    "unlearnable": "have nothing to learn",
    "replacement": "have replacement characters",
    "mojibake": "were decoded wrongly once (mojibake)",
    "control": "have control characters",
}


def show_report(report: Report, out: Path | None) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    for name, value in (*_amounts(report), *_repeated(report), *_wrong(report)):
        table.add_row(name, escape(value))
    if out is not None:
        held = f", {report.validation_documents:,} documents held out" if report.validation_documents else ""
        table.add_row("written", escape(f"{out}: {report.num_shards} shards{held}"))
    speed = f"{report.bytes / max(report.seconds, 1e-9) / MB:.1f} MB/s"
    table.add_row(
        "took",
        f"{format_seconds(report.seconds)}, {speed}, {format_rate(report.counts.tokens / max(report.seconds, 1e-9))} tokens/s",
    )
    console().print(table)


def _amounts(report: Report) -> list[tuple[str, str]]:
    counts = report.counts
    chats = f", {counts.chats:,} of them chats" if counts.chats else ""
    learned = f", {counts.learned_tokens / max(counts.tokens, 1):.0%} of them learned" if counts.chats else ""
    sizes = ", ".join(f"{tokens:,} at {percent} %" for percent, tokens in report.percentiles.items())
    rows = [
        ("sources", f"{report.files:,} files, {format_bytes(report.bytes)}"),
        ("documents", f"{counts.documents:,}{chats}"),
        ("tokens", f"{format_count(counts.tokens)}{learned}, {counts.characters / max(counts.tokens, 1):.2f} characters a token"),
        ("lengths", f"{counts.shortest:,} to {counts.longest:,} tokens; {sizes}"),
    ]
    if report.skipped:
        endings = ", ".join(f"{number:,} {ending}" for ending, number in report.skipped[:6])
        rows.append(("left out", f"{endings}: endings that are not known as text"))
    return rows


def _repeated(report: Report) -> list[tuple[str, str]]:
    found = report.repeats
    part = f" of the first {found.compared:,}" if found.compared < report.counts.documents else ""
    share = found.exact / max(found.compared, 1)
    return [("duplicates", f"{found.exact:,} equal ({share:.1%}) and {found.near:,} nearly equal to an earlier document{part}")]


def _wrong(report: Report) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for what, said in WRONG.items():
        if number := getattr(report.counts, what):
            examples = "; ".join(report.counts.examples.get(what, [])[:2])
            rows.append(("wrong", f"{number:,} {said}: {examples}"))
    return rows
