"""`windlass route fit` and `report`: tables to a router, and what it gains."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput


class FitCommand(Frozen):
    answers: tuple[Path, ...]
    models: str | None = None
    prices: tuple[str, ...] = ()
    floor: float = 0.95
    confidence: float = 0.95
    out: Path = Path("router.json")
    plot: Path | None = None
    page: Path | None = None
    as_json: bool = False
    region: str = "world"
    energy: str = "as the tables have it"


def fit_command(command: FitCommand) -> int:
    from windlass.cli.route.journals import read_answers
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.tasks.route.decide.router_file import encode_router
    from windlass.tasks.route.fit.confident import fit_confident
    from windlass.tasks.route.fit.fit import NUM_STEPS, FitOptions, fit
    from windlass.tasks.route.report.report import report_of
    from windlass.tasks.route.tables.table import make_table

    options = FitOptions(floor=command.floor, confidence=command.confidence, region=command.region, energy=command.energy)
    prices, names = parse_prices(command.prices), parse_models(command.models)
    answers = read_answers(command.answers)
    table = make_table(answers, names, prices)
    confident = fit_confident(answers, table.models)
    del answers  # a table of 14,000 prompts is 10 MB of them
    with _progress("fitting", NUM_STEPS, shown=not command.as_json) as done:
        fitted = fit(table, options, done)
    report = report_of(fitted)
    router = msgspec.structs.replace(fitted.router, report=report, confident=confident)
    write_atomically(command.out, encode_router(router))
    _write_extras(report, command.plot, command.page)
    _print(report, command.as_json, command.out)
    return 0


def report_command(file: Path, plot: Path | None, page: Path | None, as_json: bool) -> int:
    from windlass.tasks.route.decide.router_file import read_router

    report = read_router(file).report
    _write_extras(report, plot, page)
    _print(report, as_json, None)
    return 0


def _print(report: Mapping[str, Any], as_json: bool, out: Path | None) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
        return
    from windlass.cli.route.tables import show_report

    show_report(report)
    if out is not None:
        sys.stderr.write(f"written: {out}\n")


def _write_extras(report: Mapping[str, Any], plot: Path | None, page: Path | None) -> None:
    from windlass.model.formats.disk.atomic import write_atomically

    if plot is not None:
        from windlass.tasks.route.report.plot import pareto_plot

        write_atomically(plot, pareto_plot(report))
    if page is not None:
        from windlass.tasks.route.report.page import page_of

        write_atomically(page, page_of(report))


def parse_models(text: str | None) -> list[str]:
    """`small=NAME,large=NAME` or `NAME,NAME`, cheapest first."""
    if text is None:
        return []
    found = [part.partition("=")[2] or part for part in text.split(",")]
    names = [name.strip() for name in found]
    if not all(names) or len(set(names)) < 2 or len(set(names)) < len(names):
        raise BadInput(f"--models {text!r} should name two models or more, cheapest first: small=NAME,large=NAME")
    return names


def parse_prices(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """`NAME=IN,OUT`: dollars per million prompt and answer tokens."""
    from windlass.tasks.evaluate.run.budget import parse_price

    found: dict[str, tuple[float, float]] = {}
    for text in texts:
        name, _, price = text.rpartition("=")
        if not name:
            raise BadInput(f"--price {text!r} names no model; write NAME=0.5,1.5 (dollars per million prompt and answer tokens)")
        one = parse_price(price)
        if one.usd_per_hour:
            raise BadInput(f"--price {text!r} is per hour; a table of answers needs dollars per million tokens: NAME=0.5,1.5")
        found[name] = (one.usd_per_million_prompt, one.usd_per_million_answer)
    return found


class _progress:  # noqa: N801 - used as a context manager, like a function
    """A bar on standard error that counts steps."""

    def __init__(self, title: str, total: int, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), disable=not (shown and sys.stderr.isatty()), transient=True)
        self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
