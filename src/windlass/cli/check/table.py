"""The report as a table: groups of hosts, not a row for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from windlass.check.report import Report, grouped
from windlass.cli.console import console
from windlass.units import format_seconds

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


def show(report: Report, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(report.as_json()).decode())
        return
    console().print(table(report))
    for line in estimate_lines(report.estimates):
        console().print(line, markup=False)
    counts = {state: sum(check.state == state for check in report.checks) for state in ("pass", "warn", "fail")}
    console().print(f"{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed", markup=False)


def table(report: Report) -> Table:
    from rich.markup import escape
    from rich.table import Table

    groups = grouped(report.checks)
    several = len({host for group in groups for host in group.hosts}) > 1
    made = Table("check", "state", *(["hosts"] if several else []), "measured", "needed", "what to do", box=None, pad_edge=False)
    for group in groups:
        check = group.check
        words = [check.name, f"[{COLOURS[check.state]}]{check.state}[/]"]
        words += [escape(group.where)] if several else []
        made.add_row(*words, escape(check.measured), escape(check.needed), escape(check.remedy))
    return made


def estimate_lines(estimates: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for number, one in estimates.get("examples", {}).items():
        lines.append(f"{number} examples: {format_seconds(one['seconds'])}{_price(one['usd'])}")
    if "training" in estimates:
        one = estimates["training"]
        lines.append(f"training, {one['steps']:,} steps: {format_seconds(one['seconds'])}{_price(one['usd'])}")
    if estimates.get("basis"):
        lines.append(f"({estimates['basis']})")
    return lines


def _price(usd: float) -> str:
    return f", ${usd:,.2f}" if usd >= 0.005 else ""
