"""`windlass eval compare`: journals of several evaluations, question by question."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.errors import BadInput
from windlass.tasks.evaluate.report.compare import Comparison, compare
from windlass.tasks.evaluate.run.records import Record


class _Line(msgspec.Struct):
    key: str
    payload: Record


def compare_folders(folders: Sequence[Path], as_json: bool) -> int:
    runs: dict[str, list[Record]] = {}
    for folder in folders:
        for name, records in read_folder(folder).items():
            label = name if name not in runs else f"{name} ({folder})"
            runs[label] = records
    if len(runs) < 2:
        raise BadInput(f"{', '.join(map(str, folders))} hold one evaluation of one model; name at least two to compare")
    found = compare(runs)
    if not found:
        raise BadInput("these evaluations have no question in common")
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode({"comparisons": found}), indent=2).decode() + "\n")
    else:
        _show(found)
    return 0


def _show(found: Sequence[Comparison]) -> None:
    from windlass.cli.console import console
    from windlass.cli.eval.tables import comparison_table

    console().print(comparison_table(found))


def read_folder(folder: Path) -> dict[str, list[Record]]:
    """Of a results folder, or of one model's in it. Journals are only read; a line that is cut off is left out."""
    files = [folder / "journal.jsonl"] if (folder / "journal.jsonl").is_file() else sorted(folder.glob("*/journal.jsonl"))
    if not files:
        raise BadInput(f"{folder} holds no journal of an evaluation")
    return {file.parent.name: read_journal(file) for file in files}


def read_journal(file: Path) -> list[Record]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from None
    found: dict[str, Record] = {}
    decoder: Any = msgspec.json.Decoder(_Line)
    for line in lines[1:-1]:
        try:
            record: Record = decoder.decode(line).payload
        except DECODE_ERRORS:
            break
        found[record.key] = record
    return list(found.values())
