"""`windlass check` from its options to a report: which checks there are for what is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.cli.check.options import CheckOptions, Found, plan_row, say
from windlass.cli.check.table import show
from windlass.errors import BadInput
from windlass.tasks.check.needs import Needs, needs_of_plan
from windlass.tasks.check.report import Check, Report, failed, passed

if TYPE_CHECKING:
    from windlass.core.plan import Plan


def run_check(options: CheckOptions) -> int:
    monitored = _monitor(options.monitor)  # first: an address that is none is not found out after minutes of measuring
    found = _target(options)
    rows = [*_machines(options, found.needs), *found.rows, *monitored]
    report = Report(checks=tuple(rows), estimates=found.estimates)
    show(report, options.as_json)
    return report.exit_code


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
    """And the files of its model, where they are on this machine."""
    from windlass.cli.check.model import file_rows

    source = plan.checkpoint.source if plan.checkpoint is not None else ""
    path = Path(source) if plan.train is None and source and Path(source).exists() else None
    return Found(needs=needs_of_plan(plan), rows=(plan_row(plan), *file_rows(path, options)))


def _machines(options: CheckOptions, needs: Needs) -> list[Check]:
    if options.hosts is not None:
        from windlass.cli.check.hosts import check_hosts

        return check_hosts(options, needs)
    from windlass.runtime.machine.health.disk_check import disk_room, measure_disk
    from windlass.tasks.check.machine.disk import judge_disk
    from windlass.tasks.check.machine.facts import judge_machine, read_machine

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
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        link = kinds[parts.scheme](parts.hostname or "", parts.port, timeout=5)
    except (KeyError, ValueError):
        raise BadInput(f"--monitor {url!r} is no address; write it like http://localhost:9090/-/ready") from None
    try:
        link.request("GET", f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}")
        status = link.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return [failed("monitoring", f"{url}: {error}", "an answer", "start it, or open its port")]
    finally:
        link.close()
    if status >= 400:
        return [failed("monitoring", f"{url} answers {status}", "an answer", "check the path of the address")]
    return [passed("monitoring", f"{url} answers {status}")]
