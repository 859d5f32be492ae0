"""Where a plan goes: the terminal, JSON, a file, a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from windlass.core.plan import Plan, encode_plan
from windlass.errors import BadInput, DoesNotFit


class Output(msgspec.Struct, frozen=True):
    as_json: bool
    save: Path | None
    plot: Path | None

    def write(self, plan: Plan) -> int:
        if self.save is not None:
            write_atomically(self.save, msgspec.json.format(encode_plan(plan), indent=1))
        if self.plot is not None:
            from windlass.cli.plan_plot import draw

            draw(plan, self.plot)
        if self.as_json:
            text = encode_plan(plan)
            sys.stdout.write((msgspec.json.format(text, indent=2) if sys.stdout.isatty() else text).decode() + "\n")
        else:
            from windlass.cli.plan_table import show

            show(plan, saved=[path for path in (self.save, self.plot) if path is not None])
        return 0 if plan.fits else DoesNotFit.exit_code


def write_atomically(path: Path, data: bytes) -> None:
    """To a temporary name beside it, then renamed: never half a file, never a lost old one."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None
