"""`windlass check` from its options to a report: which checks there are for what is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.check.needs import Needs, needs_of_plan
from windlass.check.report import Check, Report, failed, passed
from windlass.cli.check.table import show
from windlass.core.model import Frozen
from windlass.errors import Error

if TYPE_CHECKING:
    from windlass.core.plan import Plan


class CheckOptions(Frozen):
    target: str = ""
    hosts: Path | None = None
    full: bool = False
    folder: Path = Path()
    shared: Path | None = None
    ports: tuple[int, ...] = ()
    tasks: str | None = None
    examples: int | None = None
    price: float = 0.0
    quant: str | None = None
    random_weights: bool = False
    device: str = "auto"
    context_tokens: int | None = None
    monitor: str | None = None
    python: str = ""
    as_json: bool = False


class Found(Frozen):
    """What the target needs, and the rows and estimates of its own checks."""

    needs: Needs = Needs()
    rows: tuple[Check, ...] = ()
    estimates: dict[str, Any] = {}


def run_check(options: CheckOptions) -> int:
    found = _target(options)
    rows = [*_machines(options, found.needs), *found.rows, *_monitor(options.monitor)]
    report = Report(checks=tuple(rows), estimates=found.estimates)
    show(report, options.as_json)
    return report.exit_code


def say(options: CheckOptions, text: str) -> None:
    """What takes longer than two seconds is announced, on a terminal."""
    if not options.as_json and sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr, flush=True)


def _target(options: CheckOptions) -> Found:
    if not options.target:
        return Found()
    if options.target.endswith(".toml"):
        from windlass.cli.check.recipe import check_recipe

        return check_recipe(options)
    if options.target.endswith(".json") and Path(options.target).is_file():
        from windlass.open.plan import read_plan

        return of_plan(read_plan(Path(options.target)), options)
    from windlass.cli.check.model import check_model

    return check_model(options)


def of_plan(plan: Plan, options: CheckOptions) -> Found:
    return Found(needs=needs_of_plan(plan), rows=(plan_row(plan),), estimates={})


def plan_row(plan: Plan) -> Check:
    from windlass.units import format_bytes

    fullest = max(plan.memory.per_device, key=lambda device: device.total_bytes)
    shown = (
        f"{format_bytes(fullest.total_bytes)} of {format_bytes(fullest.capacity_bytes)} on the fullest device of {plan.hardware}"
    )
    if plan.fits:
        return passed("plan", shown)
    remedy = "; ".join(plan.would_fit[:2]) or "more or larger devices"
    return failed("plan", f"{shown}: {format_bytes(plan.short_bytes)} short", "that it fits", remedy)


def _machines(options: CheckOptions, needs: Needs) -> list[Check]:
    if options.hosts is not None:
        from windlass.cli.check.hosts import check_hosts

        return check_hosts(options, needs)
    from windlass.check.machine.disk import judge_disk
    from windlass.check.machine.facts import judge_machine, read_machine
    from windlass.machine.disk_check import disk_room, measure_disk

    facts = read_machine(full=options.full)
    if options.full:
        say(options, f"measuring the disk of {options.folder}")
    disk = measure_disk(options.folder) if options.full else disk_room(options.folder)
    return [*judge_machine(facts, needs), *judge_disk(disk, needs, facts.host.host)]


def _monitor(url: str | None) -> list[Check]:
    if url is None:
        return []
    import http.client
    from urllib.parse import urlsplit

    parts = urlsplit(url if "//" in url else f"http://{url}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    link = kind(parts.hostname or "", parts.port, timeout=5)
    try:
        link.request("GET", parts.path or "/")
        status = link.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return [failed("monitoring", f"{url}: {error}", "an answer", "start it, or open its port")]
    finally:
        link.close()
    if status >= 400:
        return [failed("monitoring", f"{url} answers {status}", "an answer", "check the path of the address")]
    return [passed("monitoring", f"{url} answers {status}")]


def problem_of(error: Error) -> str:
    return " ".join(str(error).split())
