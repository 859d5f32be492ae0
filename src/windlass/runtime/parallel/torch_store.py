"""A rendezvous store as torch.distributed's Store, so that gloo and NCCL use the same authenticated channel as everything else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from windlass.runtime.parallel.group import GroupLost
from windlass.runtime.parallel.mesh import RENDEZVOUS_SECONDS
from windlass.runtime.parallel.store import RendezvousStore


class DistributedStore(Store):
    """Keys are written once: `add` and `delete_key` are missing, and neither backend calls them."""

    def __init__(self, store: RendezvousStore, prefix: str, timeout_seconds: float = RENDEZVOUS_SECONDS) -> None:
        super().__init__()
        self._store, self._prefix, self._seconds = store, prefix, timeout_seconds

    def set(self, key: str, value: str | bytes) -> None:
        self._store.put(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._store.take(self._prefix + key, self._seconds)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._store.take(self._prefix + key, self._seconds if timeout is None else timeout.total_seconds())

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
