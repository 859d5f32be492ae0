"""The report as one HTML page that needs nothing else. Names come from tables, so everything is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from windlass.core.statistics.intervals import show_interval, show_percent
from windlass.errors import MissingExtra
from windlass.tasks.route.report.plot import pareto_plot

STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}tr.router td{font-weight:600;background:#eef3fa}.note{color:#555}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#1b1b1b}tr.router td{background:#26324a}td,th{border-color:#444}.note{color:#aaa}
svg{background:#fff}}"""


def page_of(report: Mapping[str, Any]) -> bytes:
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>",
        f"<title>Router against its models</title><style>{STYLE}</style><h1>Router against its models</h1>",
        f"<p>{report['num_prompts']:,} prompts, {escape(report['cross_validation'])}. Cost: {escape(report['cost_unit'])}. "
        f"Energy: {escape(report['energy'])}; grid: {escape(report['region'])}.</p>",
        _table(_HEAD, [_row(*row) for row in _named(report)]),
        "".join(f"<p>{escape(line)}</p>" for line in summary(report)),
        _plot(report),
        "<h2>Calibration</h2><p class='note'>Chance of being right as predicted, and as found, in tenths of the prompts.</p>",
        *(_calibration(one) for one in report["calibration"]),
        "</html>",
    ]
    return "\n".join(parts).encode()


_HEAD = ("", "score", "95 %", "cost", "median s", "p95 s", "tokens", "joules", "g CO2", "calls")


def _named(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    base = report["baselines"]
    models = [(model["name"], model, False) for model in report["models"]]
    return [
        *models, ("router", report["router"], True), ("random", base["random"], False),
        ("by length", base["length"], False), ("oracle", base["oracle"], False),
    ]  # fmt: skip


def _row(name: str, found: Mapping[str, Any], is_router: bool) -> str:
    interval = (found["score_interval"][0], found["score_interval"][1])
    share = ", ".join(f"{100 * part:.0f} % {model}" for model, part in found["share"].items() if part)
    median = found.get("seconds_p50") or found.get("seconds")
    cells = [
        name, show_percent(found["score"], interval), show_interval(interval), f"{found['cost']:.4g}", _number(median),
        _number(found.get("seconds_p95")), _number(found.get("tokens")), _number(found.get("joules")), _number(found.get("grams_co2")), share,
    ]  # fmt: skip
    return f"<tr{' class=router' if is_router else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    return f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>{''.join(rows)}</table>"


def summary(report: Mapping[str, Any]) -> list[str]:
    floor, over = report["floor"], report["over_best_single"]
    low, high = over["score_interval"]
    found = [
        f"Floor {floor['asked']:g} with {floor['confidence']:.0%} confidence: held {floor['held']:.3f}, "
        f"{floor['cheap_share']:.0%} of calls to other models than the best single one; missed in "
        f"{floor['splits']['num_missed']} of {floor['splits']['num_splits']} random splits.",
        f"Against the best single model: {100 * over['score']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}).",
    ]
    if report["apgr"] is not None:
        found.append(f"APGR {report['apgr']:.3f}, CPT50 {report['cpt50']:.1%}, CPT80 {report['cpt80']:.1%}.")
    return found


def _plot(report: Mapping[str, Any]) -> str:
    """Left out where matplotlib is not installed."""
    try:
        drawn = pareto_plot(report, "svg").decode()
    except MissingExtra:
        return ""
    return drawn[drawn.index("<svg") :]


def _calibration(found: Mapping[str, Any]) -> str:
    rows = [f"<tr><td></td><td>{low:.2f}</td><td>{seen:.2f}</td><td>{count:,}</td></tr>" for low, seen, count in found["bins"]]
    title = f"{escape(found['model'])}: Brier {found['brier']:.3f} (always the mean: {found['brier_of_mean']:.3f})"
    return f"<h3>{title}</h3>{_table(('', 'predicted', 'found', 'prompts'), rows)}"
