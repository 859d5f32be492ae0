"""The report's files: JSON, Markdown, an HTML page, a PNG. Pure: whoever calls writes them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from windlass.errors import MissingExtra
from windlass.tasks.evaluate.report.markdown import markdown
from windlass.tasks.evaluate.report.page import page
from windlass.tasks.evaluate.report.plot import plot
from windlass.tasks.evaluate.report.report import ModelRun, Report
from windlass.tasks.evaluate.report.results import Measured


def files(report: Report, clock: Sequence[Measured], runs: Sequence[ModelRun]) -> dict[str, bytes]:
    """By name. report.json and report.md follow from the answers alone; measured.json and a line of report.html hold what clocks said."""
    made = {
        "report.json": msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n",
        "report.md": markdown(report).encode(),
        "measured.json": msgspec.json.format(msgspec.json.encode(list(clock)), indent=1) + b"\n",
        "report.html": page(report, clock, runs),
    }
    try:
        return made | {"report.png": plot(report)}
    except MissingExtra:  # the picture is left out where matplotlib is not installed
        return made
