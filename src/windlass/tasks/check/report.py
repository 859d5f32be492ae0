"""One row a check, and the report of all: its state, its exit code, and rows of many hosts as groups. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from windlass.core.model import Frozen

State = Literal["pass", "warn", "fail"]
ORDER: dict[State, int] = {"pass": 0, "warn": 1, "fail": 2}
"""Also the exit codes."""
SHOWN_HOSTS = 3


class Check(Frozen):
    name: str
    state: State
    measured: str
    needed: str = ""
    remedy: str = ""
    host: str = ""
    """Empty: it is of no host in particular."""


class Report(Frozen):
    checks: tuple[Check, ...]
    estimates: dict[str, Any] = {}

    @property
    def state(self) -> State:
        return worst(check.state for check in self.checks)

    @property
    def exit_code(self) -> int:
        return ORDER[self.state]

    def as_json(self) -> dict[str, Any]:
        return {"checks": self.checks, "estimates": self.estimates, "state": self.state}


class Group(Frozen):
    """Rows that say the same of several hosts."""

    check: Check
    hosts: tuple[str, ...]

    @property
    def where(self) -> str:
        return host_list(self.hosts)


def passed(name: str, measured: str, needed: str = "", host: str = "") -> Check:
    return Check(name=name, state="pass", measured=measured, needed=needed, host=host)


def warned(name: str, measured: str, needed: str, remedy: str, host: str = "") -> Check:
    return Check(name=name, state="warn", measured=measured, needed=needed, remedy=remedy, host=host)


def failed(name: str, measured: str, needed: str, remedy: str, host: str = "") -> Check:
    return Check(name=name, state="fail", measured=measured, needed=needed, remedy=remedy, host=host)


def worst(states: Iterable[State]) -> State:
    found: State = "pass"
    for state in states:
        found = state if ORDER[state] > ORDER[found] else found
    return found


def grouped(checks: Iterable[Check]) -> list[Group]:
    """Passing rows of one check become one row, whatever they measured; others are joined if they say the same."""
    found: dict[tuple[str, ...], list[Check]] = {}
    for check in checks:
        key = (check.name, check.state, "" if check.state == "pass" and check.host else check.measured + check.remedy)
        found.setdefault(key, []).append(check)
    return [_group(rows) for rows in found.values()]


def _group(rows: list[Check]) -> Group:
    first, hosts = rows[0], tuple(dict.fromkeys(row.host for row in rows if row.host))
    measured = list(dict.fromkeys(row.measured for row in rows))
    if len(measured) > 1:
        shown = f"{measured[0]} to {measured[-1]}" if len(measured) == 2 else f"{measured[0]}, and {len(measured) - 1} like it"
        first = Check(name=first.name, state=first.state, measured=shown, needed=first.needed, remedy=first.remedy)
    return Group(check=first, hosts=hosts)


def host_list(hosts: Iterable[str]) -> str:
    """`n1, n2, n3 and 1,021 more`"""
    every = list(hosts)
    if len(every) <= SHOWN_HOSTS + 1:
        return ", ".join(every)
    return f"{', '.join(every[:SHOWN_HOSTS])} and {len(every) - SHOWN_HOSTS:,} more"


def one_line(report: Report) -> str:
    """What a command prints before it starts."""
    bad = [check for check in report.checks if check.state != "pass"]
    if not bad:
        return f"check: {len(report.checks)} checks passed"
    shown = "; ".join(f"{check.name}: {check.measured} ({check.remedy})" for check in bad[:3])
    rest = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"check: {report.state}: {shown}{rest}"
