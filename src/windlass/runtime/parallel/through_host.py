"""Groups of GPU ranks that communicate through host memory: for ranks that share a GPU, which NCCL does not support, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.runtime.parallel.group import Count, Group
from windlass.runtime.parallel.groups import Groups


def through_host(groups: Groups, device: str) -> Groups:
    return Groups(HostStagedGroup(groups.tp, device), HostStagedGroup(groups.pp, device))


@dataclass(frozen=True)
class HostStagedGroup:
    """`inner` communicates between CPUs."""

    inner: Group
    device: str

    is_native = False

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def all_reduce(self, x: Tensor) -> None:
        if self.size > 1:
            here = x.cpu()
            self.inner.all_reduce(here)
            x.copy_(here)

    def all_gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        here = [torch.empty_like(to, device="cpu") for to in into]
        self.inner.all_gather(x.cpu(), here)
        _copy(here, into)

    def gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        here = [torch.empty_like(to, device="cpu") for to in into] if self.rank == 0 else []
        self.inner.gather(x.cpu(), here)
        _copy(here, into)

    def broadcast(self, x: Tensor) -> None:
        here = x.cpu()
        self.inner.broadcast(here)
        x.copy_(here)

    def send_next(self, x: Tensor) -> None:
        self.inner.send_next(x.cpu())

    def receive_previous(self, x: Tensor) -> None:
        here = torch.empty_like(x, device="cpu")
        self.inner.receive_previous(here)
        x.copy_(here)

    def counts(self) -> dict[str, Count]:
        return self.inner.counts()

    def close(self) -> None:
        self.inner.close()


def _copy(here: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for to, part in zip(into, here, strict=False):
        to.copy_(part)
