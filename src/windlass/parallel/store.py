"""A board as torch.distributed's Store, so that gloo and NCCL meet over the same authenticated channel as everything else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from windlass.parallel.group import GroupLost
from windlass.parallel.rendezvous import Board

MEETING_SECONDS = 120.0


class BoardStore(Store):
    """Notes are written once: what counts up or takes back is not to be had, and neither backend asks for it."""

    def __init__(self, board: Board, prefix: str, timeout_seconds: float = MEETING_SECONDS) -> None:
        super().__init__()
        self._board, self._prefix, self._seconds = board, prefix, timeout_seconds

    def set(self, key: str, value: str | bytes) -> None:
        self._board.put(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._board.take(self._prefix + key, self._seconds)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._board.take(self._prefix + key, self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        try:
            self.wait(keys, timedelta(0))
        except GroupLost:
            return False
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)
