"""The quick check of this machine, and the line that `serve`, `train run` and `launch` print before they start."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import Error

if TYPE_CHECKING:
    from windlass.tasks.check.needs import Needs
    from windlass.tasks.check.report import Report

SKIP = "WINDLASS_SKIP_CHECK"
STOPPING = ("gpus", "ram", "/dev/shm")
"""Checks without which nothing can start; what else fails is said, and may still work (an XID of last week)."""


class CheckFailed(Error):
    """What is asked for would fail on this machine."""


def quick_report(needs: Needs, folder: Path) -> Report:
    from windlass.runtime.machine.health.disk_check import disk_room
    from windlass.tasks.check.machine.disk import judge_disk
    from windlass.tasks.check.machine.facts import judge_machine, read_machine
    from windlass.tasks.check.report import Report

    facts = read_machine()
    rows = [*judge_machine(facts, needs), *judge_disk(disk_room(folder), needs, facts.host.host)]
    return Report(checks=tuple(rows))


def check_before(command: str, folder: Path | None = None, num_gpus: int = 0, num_machines: int = 1, shown: bool = True) -> None:
    """One line on standard error. Raises CheckFailed for what cannot start; WINDLASS_SKIP_CHECK=1 leaves it out.

    `folder`: where the command writes. Without one it can do without a disk."""
    if os.environ.get(SKIP):
        return
    from windlass.tasks.check.needs import Needs
    from windlass.tasks.check.report import one_line

    report = quick_report(Needs(num_gpus=num_gpus, num_machines=num_machines), folder or Path.cwd())
    line = one_line(report)
    stopping = STOPPING if folder is None else (*STOPPING, "disk room")
    if any(row.state == "fail" and row.name in stopping for row in report.checks):
        raise CheckFailed(f"{line}; {SKIP}=1 starts `{command}` anyway")
    if shown or report.state != "pass":
        with suppress(OSError):  # a full disk behind standard error does not stop a server
            os.write(2, f"{line}\n".encode())
