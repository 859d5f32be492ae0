"""`windlass route replay`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from windlass.errors import BadInput
from windlass.tasks.route.operate.log import replay


def replay_command(log: Path, as_json: bool) -> int:
    try:
        with log.open("rb") as stream:
            found = replay(stream, str(log))
    except OSError as error:
        raise BadInput(f"{log} cannot be read: {error.strerror}") from None
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        sys.stdout.write(f"{found.num_same:,} of {found.num_decisions:,} decisions are the same\n")
    if found.first_difference:
        raise BadInput(f"the first that is not: {found.first_difference}")
    return 0
