"""Process groups over torch.distributed: gloo between CPUs, NCCL between NVIDIA GPUs.

Each group has its own backend object and store, and does not use torch.distributed's global state, so that a process may join the groups of one
run after another. A collective that a rank does not join times out with `GroupLost`; the group cannot be used after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from windlass.errors import Impossible
from windlass.runtime.parallel.close_listeners import close_new_listeners
from windlass.runtime.parallel.counters import CollectiveCounters
from windlass.runtime.parallel.group import Count, GroupLost
from windlass.runtime.parallel.mesh import RENDEZVOUS_SECONDS
from windlass.runtime.parallel.store import RendezvousStore
from windlass.runtime.parallel.torch_store import DistributedStore

TIMEOUT_SECONDS = 20.0
"""A step takes less than this on any hardware worth splitting over; a rank that takes longer is dead or hung."""


class ProcessGroup:
    is_native = False

    def __init__(self, backend: Any, rank: int, size: int, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`backend`: a ProcessGroupGloo or ProcessGroupNCCL of torch.distributed."""
        self._backend, self.rank, self.size = backend, rank, size
        self._timeout = timedelta(seconds=timeout_seconds)
        self._counts = CollectiveCounters()

    def all_reduce(self, x: Tensor) -> None:
        """Both backends use a ring: each rank sends (size - 1) / size of the tensor twice (reduce-scatter, all-gather)."""
        passed = 2 * _bytes(x) * (self.size - 1) // self.size
        with self._counts.counted("all_reduce", passed, passed):
            self._wait(lambda: self._backend.allreduce([x]), x)

    def all_gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        passed = _bytes(x) * (self.size - 1)
        with self._counts.counted("all_gather", passed, passed):
            self._wait(lambda: self._backend.allgather([list(into)], [x]), x)

    def gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        """Point to point, because gloo's own gather needs parts of one size."""
        if self.rank:
            with self._counts.counted("gather", _bytes(x), 0):
                self._wait(lambda: self._backend.send([x], 0, 0), x)
            return
        into[0].copy_(x)
        with self._counts.counted("gather", 0, sum(map(_bytes, into[1:]))):
            for rank in range(1, self.size):
                self._wait(lambda rank=rank: self._backend.recv([into[rank]], rank, 0), into[rank])

    def broadcast(self, x: Tensor) -> None:
        sent, received = (_bytes(x) * (self.size - 1), 0) if self.rank == 0 else (0, _bytes(x))
        with self._counts.counted("broadcast", sent, received):
            self._wait(lambda: self._backend.broadcast([x]), x)

    def send_next(self, x: Tensor) -> None:
        with self._counts.counted("send_next", _bytes(x), 0):
            self._wait(lambda: self._backend.send([x], (self.rank + 1) % self.size, 0), x)

    def receive_previous(self, x: Tensor) -> None:
        with self._counts.counted("receive_previous", 0, _bytes(x)):
            self._wait(lambda: self._backend.recv([x], (self.rank - 1) % self.size, 0), x)

    def counts(self) -> dict[str, Count]:
        return self._counts.all()

    def close(self) -> None:
        self._backend.shutdown()

    def _wait(self, begin: Callable[[], Any], x: Tensor) -> None:
        """Empty tensors are skipped: a step may need no logits. All ranks know."""
        if not x.numel():
            return
        try:
            begin().wait(self._timeout)
        except RuntimeError as error:
            raise GroupLost(f"rank {self.rank} of {self.size} lost a peer: {error}") from error


def gloo_group(store: RendezvousStore, name: str, rank: int, size: int, host: str, timeout_seconds: float) -> ProcessGroup:
    host = host or "127.0.0.1"
    with close_new_listeners(host):  # gloo keeps listening
        made = _gloo(DistributedStore(store, f"{name}/"), rank, size, host, timedelta(seconds=RENDEZVOUS_SECONDS))
    return ProcessGroup(made, rank, size, timeout_seconds)


def nccl_group(store: RendezvousStore, name: str, rank: int, size: int, timeout_seconds: float) -> ProcessGroup:
    made = _nccl(DistributedStore(store, f"{name}/"), rank, size, timedelta(seconds=RENDEZVOUS_SECONDS))
    return ProcessGroup(made, rank, size, timeout_seconds)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _gloo(store: Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    if not torch.distributed.is_nccl_available():
        raise Impossible("this PyTorch has no NCCL, which GPU ranks need; run on CPUs, or install a build with NCCL")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)
