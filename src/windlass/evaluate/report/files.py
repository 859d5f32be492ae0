"""The report's files: JSON, Markdown, an HTML page, a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from windlass.errors import MissingExtra
from windlass.evaluate.report.markdown import markdown
from windlass.evaluate.report.page import page
from windlass.evaluate.report.plot import plot
from windlass.evaluate.report.report import ModelRun, Report
from windlass.evaluate.report.results import Measured
from windlass.formats.disk.atomic import write_atomically


def write_files(folder: Path, report: Report, clock: Sequence[Measured], runs: Sequence[ModelRun]) -> list[Path]:
    """report.json and report.md follow from the answers alone; measured.json and a line of report.html hold what clocks said."""
    written = {
        "report.json": msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n",
        "report.md": markdown(report).encode(),
        "measured.json": msgspec.json.format(msgspec.json.encode(list(clock)), indent=1) + b"\n",
        "report.html": page(report, clock, runs),
    }
    for name, content in written.items():
        write_atomically(folder / name, content)
    return [*(folder / name for name in written), *_plotted(folder, report)]


def _plotted(folder: Path, report: Report) -> list[Path]:
    """Left out where matplotlib is not installed."""
    try:
        write_atomically(folder / "report.png", plot(report))
    except MissingExtra:
        return []
    return [folder / "report.png"]
