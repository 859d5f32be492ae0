"""Groups of processes over torch.distributed: gloo between CPUs, NCCL between NVIDIA GPUs.

A group is an object of its own with a store of its own: nothing here is a global of torch.distributed, so a process may be in the groups of
one run after another. Its backends send tensors and nothing else. A collective that some rank does not come to ends after seconds, with
`GroupLost`; a group that has lost one is of no use any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from windlass.errors import Impossible
from windlass.parallel.close_listeners import no_new_listeners
from windlass.parallel.counters import Counts
from windlass.parallel.group import Count, GroupLost
from windlass.parallel.mesh import MEETING_SECONDS
from windlass.parallel.rendezvous import Board
from windlass.parallel.store import BoardStore

TIMEOUT_SECONDS = 20.0
"""A step takes less than this on any hardware worth splitting over; a rank that takes longer is dead or stuck."""


class ProcessGroup:
    is_native = False

    def __init__(self, backend: Any, rank: int, size: int, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`backend`: a ProcessGroupGloo or ProcessGroupNCCL of torch.distributed."""
        self._backend, self.rank, self.size = backend, rank, size
        self._timeout = timedelta(seconds=timeout_seconds)
        self._counts = Counts()

    def all_reduce(self, x: Tensor) -> None:
        """A ring, as both backends have it: every rank passes on all but its own share of the sum, and then of the result."""
        passed = 2 * _bytes(x) * (self.size - 1) // self.size
        with self._counts.counted("all_reduce", passed, passed):
            self._done(lambda: self._backend.allreduce([x]), x)

    def all_gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        passed = _bytes(x) * (self.size - 1)
        with self._counts.counted("all_gather", passed, passed):
            self._done(lambda: self._backend.allgather([list(into)], [x]), x)

    def gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        """Rank by rank, because gloo's own wants parts of one size."""
        if self.rank:
            with self._counts.counted("gather", _bytes(x), 0):
                self._done(lambda: self._backend.send([x], 0, 0), x)
            return
        into[0].copy_(x)
        with self._counts.counted("gather", 0, sum(map(_bytes, into[1:]))):
            for rank in range(1, self.size):
                self._done(lambda rank=rank: self._backend.recv([into[rank]], rank, 0), into[rank])

    def broadcast(self, x: Tensor) -> None:
        sent, received = (_bytes(x) * (self.size - 1), 0) if self.rank == 0 else (0, _bytes(x))
        with self._counts.counted("broadcast", sent, received):
            self._done(lambda: self._backend.broadcast([x]), x)

    def send_next(self, x: Tensor) -> None:
        with self._counts.counted("send_next", _bytes(x), 0):
            self._done(lambda: self._backend.send([x], (self.rank + 1) % self.size, 0), x)

    def take_previous(self, x: Tensor) -> None:
        with self._counts.counted("take_previous", 0, _bytes(x)):
            self._done(lambda: self._backend.recv([x], (self.rank - 1) % self.size, 0), x)

    def counts(self) -> dict[str, Count]:
        return self._counts.all()

    def close(self) -> None:
        self._backend.shutdown()

    def _done(self, begin: Callable[[], Any], x: Tensor) -> None:
        """Nothing is said where there is nothing to say: a step may want no logits. All ranks know."""
        if not x.numel():
            return
        try:
            begin().wait(self._timeout)
        except RuntimeError as error:
            raise GroupLost(f"rank {self.rank} of {self.size} lost another: {error}") from error


def gloo_group(board: Board, name: str, rank: int, size: int, host: str, timeout_seconds: float) -> ProcessGroup:
    meeting = timedelta(seconds=MEETING_SECONDS)
    host = host or "127.0.0.1"
    with no_new_listeners(host):  # gloo itself listens on, for nobody
        made = _gloo(BoardStore(board, f"{name}/"), rank, size, host, meeting)
    return ProcessGroup(made, rank, size, timeout_seconds)


def nccl_group(board: Board, name: str, rank: int, size: int, timeout_seconds: float) -> ProcessGroup:
    made = _nccl(BoardStore(board, f"{name}/"), rank, size, timedelta(seconds=MEETING_SECONDS))
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
        raise Impossible("this PyTorch has no NCCL, through which GPUs talk; run on CPUs, or install a build that has it")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)
