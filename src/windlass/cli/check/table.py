"""The report as a table: groups of hosts, not a row for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from windlass.cli.console import console
from windlass.tasks.check.report import Check, Report, grouped

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


def show(report: Report, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(report.as_json()).decode())
        return
    console().print(table(report, console().width))
    for line in estimate_lines(report.estimates):
        console().print(line, markup=False)
    counts = {state: sum(check.state == state for check in report.checks) for state in ("pass", "warn", "fail")}
    console().print(f"{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed", markup=False)


WIDE = 120
"""Columns that five of them need. On narrower terminals what is needed and what to do stand below what was measured."""


def table(report: Report, width: int = WIDE) -> Table:
    from rich.markup import escape
    from rich.table import Table

    groups = grouped(report.checks)
    several = len({host for group in groups for host in group.hosts}) > 1
    made = Table(box=None, pad_edge=False)
    for name in [
        "check",
        "state",
        *(["hosts"] if several else []),
        "measured",
        *(["needed", "what to do"] if width >= WIDE else []),
    ]:
        made.add_column(name, overflow="fold", no_wrap=name in ("check", "state"))
    for group in groups:
        check = group.check
        words = [check.name, f"[{COLOURS[check.state]}]{check.state}[/]"]
        words += [escape(group.where)] if several else []
        made.add_row(*words, *map(escape, [check.measured, check.needed, check.remedy] if width >= WIDE else [_below(check)]))
    return made


def _below(check: Check) -> str:
    if check.state == "pass":
        return check.measured
    lines = [
        check.measured,
        *([f"needed: {check.needed}"] if check.needed else []),
        *([f"do: {check.remedy}"] if check.remedy else []),
    ]
    return "\n".join(lines)


def estimate_lines(estimates: dict[str, Any]) -> list[str]:
    lines = [f"{number} examples: {_time(one)}" for number, one in estimates.get("examples", {}).items()]
    if "training" in estimates:
        lines.append(f"training, {estimates['training']['steps']:,} steps: {_time(estimates['training'])}")
    if estimates.get("basis"):
        lines.append(f"({estimates['basis']})")
    return lines


UNITS = ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (3 * 86400.0, 3600.0, "h"), (float("inf"), 86400.0, "days"))


def _time(one: dict[str, Any]) -> str:
    """`6.2 s (5.6 to 6.9), $0.10`: all three in one unit."""
    size, unit = next((size, unit) for below, size, unit in UNITS if one["seconds"] < below)
    return f"{one['seconds'] / size:.1f} {unit} ({one['low'] / size:.1f} to {one['high'] / size:.1f}){_price(one['usd'])}"


def _price(usd: float) -> str:
    return f", ${usd:,.2f}" if usd >= 0.005 else ""
