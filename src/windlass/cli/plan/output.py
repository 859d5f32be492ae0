"""Writes a plan: to the terminal, as JSON, to a file, as a plot."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from windlass.core.plan import Plan, encode_plan
from windlass.errors import DoesNotFit


class PlanOutput(msgspec.Struct, frozen=True):
    as_json: bool
    save: Path | None
    plot: Path | None

    def write(self, plan: Plan) -> int:
        if self.save is not None:
            from windlass.model.formats.disk.atomic import write_atomically

            write_atomically(self.save, msgspec.json.format(encode_plan(plan), indent=1))
        if self.plot is not None:
            from windlass.cli.plan.plot import draw

            draw(plan, self.plot)
        if self.as_json:
            text = encode_plan(plan)
            sys.stdout.write((msgspec.json.format(text, indent=2) if sys.stdout.isatty() else text).decode() + "\n")
        else:
            from windlass.cli.plan.table import show

            show(plan, saved=[path for path in (self.save, self.plot) if path is not None])
        return 0 if plan.fits else DoesNotFit.exit_code
