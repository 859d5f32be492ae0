"""How the ranks of one epoch find each other: notes on a board, then connections between all of them that each side has proved to be one
of the ranks on, then groups.

A listener is open only while ranks meet, on the address that the meeting names and no other. Whoever does not know the epoch's key is
dropped. Imports no torch until groups are made.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from windlass.core.layout import Layout
from windlass.core.ranks.rendezvous import Meeting
from windlass.parallel.group import GroupLost
from windlass.parallel.mesh import connect_all

if TYPE_CHECKING:
    from windlass.parallel.groups import Groups
    from windlass.parallel.join import MakeLinks

__all__ = ["Board", "FolderBoard", "GroupLost", "Meeting", "connect_all", "join_ranks"]

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.05


class Board(Protocol):
    """Where ranks of one epoch leave notes for each other. A note is written once and stays."""

    def put(self, key: str, value: bytes) -> None: ...

    def take(self, key: str, timeout_seconds: float) -> bytes:
        """Waits for it; raises GroupLost when it does not come."""
        ...


class FolderBoard:
    """On one machine: a file a note, in a folder that is the ranks' own."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, key: str, value: bytes) -> None:
        """Appears whole or not at all."""
        file = self._file(key)
        unfinished = file.with_name(f"{file.name}.{os.getpid()}")
        unfinished.write_bytes(value)
        unfinished.replace(file)

    def take(self, key: str, timeout_seconds: float) -> bytes:
        until, pause = time.monotonic() + timeout_seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._file(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > until:
                    raise GroupLost(f"no note {key!r} after {timeout_seconds:g} s") from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _file(self, key: str) -> Path:
        """Names of files are short and have no slashes; keys need not."""
        return self._folder / key.encode().hex()


def join_ranks(
    meeting: Meeting, layout: Layout, rank: int, board: Board, device: str = "cpu", *, links: MakeLinks | None = None
) -> Groups:
    """The groups of `rank`; all ranks of the layout call this with boards that see each other.

    `links`: makes native links of connections (`windlass.kernels.cpu.links.make_links`); without, and on GPUs, torch.distributed talks.
    """
    from windlass.parallel.join import join

    return join(meeting, layout, rank, board, device, links)
