"""Output of `windlass convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from windlass.cli.console import console
from windlass.units import GB, format_bytes, format_seconds

if TYPE_CHECKING:
    from windlass.tasks.convert.dllama.convert import DllamaFiles
    from windlass.tasks.convert.gguf.convert import GgufModel
    from windlass.tasks.convert.report import ConvertReport

WORST_SHOWN = 5


def show_report(report: ConvertReport, out: Path) -> None:
    group = f", groups of {report.group}" if report.group else ""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_row("model", f"{report.model} ({report.family}) from {report.source}")
    smaller = (
        f"{report.compression:.2f} times smaller" if report.compression >= 1 else f"{1 / report.compression:.2f} times larger"
    )
    table.add_row("output", f"{out}: {format_bytes(report.output_bytes)} in {report.scheme}{group}, {smaller}")
    if report.tensors:
        worst = report.tensors[0]
        table.add_row("error", f"{report.relative_rms:.3%} relative RMS; worst matrix {worst.relative_rms:.3%} ({worst.name})")
    speed = f"{report.source_bytes / report.seconds / GB:.2f} GB/s"
    memory = f"peak memory {format_bytes(report.peak_memory_bytes)}"
    table.add_row("time", f"{format_seconds(report.seconds)}, {speed}, {memory}, {report.instruction_set} kernel")
    for text in (*report.notes, *(f"smaller groups: {line}" for line in report.smaller_groups[:WORST_SHOWN])):
        table.add_row("note", text)
    table.add_row("report", f"{out / 'windlass-report.md'}")
    console().print(table)


def show_dllama(made: DllamaFiles) -> None:
    out = console()
    out.print(
        f"[bold]output[/] {made.model} ({format_bytes(made.num_bytes)})" + (f" and {made.tokenizer}" if made.tokenizer else "")
    )
    for note in made.notes:
        out.print(f"[bold]note[/] {note}")


def show_gguf(made: GgufModel) -> None:
    out = console()
    out.print(f"[bold]output[/] {made.model} ({made.type}, {format_bytes(made.num_bytes)})")
    for note in made.notes:
        out.print(f"[bold]note[/] {note}")
