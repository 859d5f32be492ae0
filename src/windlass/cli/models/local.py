"""Local models: list, download, delete."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import msgspec
from rich.table import Table

from windlass.cli.console import console
from windlass.errors import BadInput
from windlass.model.families.registry import find, unknown_model
from windlass.open.resolve import download, runnable_files
from windlass.units import format_bytes


def print_local(as_json: bool) -> None:
    from windlass.model.formats.hub.local import local_models

    found = local_models()
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found, enc_hook=str), indent=2).decode() + "\n")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("model", "size", "format", "last used", "path"):
        table.add_column(name, justify="right" if name == "size" else "left")
    for model in found:
        used = datetime.fromtimestamp(model.last_used, tz=UTC).date().isoformat()
        table.add_row(model.name, format_bytes(model.num_bytes), model.format, used, str(model.path))
    console().print(table if found else "no local models; download one with `windlass models pull NAME`")


def pull(name: str, max_workers: int, as_json: bool) -> None:
    from windlass.model.formats.hub import hub

    if max_workers < 1:
        raise BadInput("--max-workers must be 1 or more")
    known = find(name)
    full = known.hub if known else name
    if not hub.looks_like_hub_name(full):
        raise unknown_model(name)
    path = (
        runnable_files(name, not as_json) if known and name.lower() != full.lower() else download(full, max_workers, not as_json)
    )
    print(msgspec.json.encode({"name": full, "path": str(path)}).decode() if as_json else path)


def remove(name: str, dry_run: bool) -> None:
    from windlass.model.formats.hub.local import remove as delete

    freed = delete(name, dry_run=dry_run)
    console().print(f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}")
