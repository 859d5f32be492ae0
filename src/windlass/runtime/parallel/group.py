"""The interface of a process group. Every rank of a group makes the same calls in the same order; results are written in place.

Tensors are contiguous, and of one shape on all ranks unless stated otherwise. Only tensor data is sent, of a size that both sides know: nothing
is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class GroupLost(Exception):
    """A rank timed out in a collective, or its connection broke. Not a user error: the caller starts a new epoch."""


class Count(msgspec.Struct, frozen=True, array_like=True):
    """Totals of one kind of collective since the group was made."""

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    """Waiting for other ranks included."""


class Group(Protocol):
    @property
    def rank(self) -> int:
        """Within the group, from 0."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def is_native(self) -> bool:
        """Whether collectives are native operations that a program records (runtime/kernels/program/program.py) and replays without Python."""
        ...

    def all_reduce(self, x: Tensor) -> None:
        """Sums `x` over ranks, in place; bitwise equal on all ranks."""
        ...

    def all_gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        """On every rank, into[r] = the `x` of rank r."""
        ...

    def gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        """On rank 0, into[r] = the `x` of rank r, whose sizes may differ; on other ranks `into` is ignored."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Every rank's `x` = that of rank 0."""
        ...

    def send_next(self, x: Tensor) -> None:
        """To the next rank; the last one sends to the first."""
        ...

    def receive_previous(self, x: Tensor) -> None:
        """Into `x`, what the previous rank sends."""
        ...

    def counts(self) -> dict[str, Count]:
        """By the name of the collective. Payload bytes, without network headers."""
        ...

    def close(self) -> None: ...


class SoloGroup:
    """A group of one rank: collectives are no-ops, so callers need no special case."""

    rank, size, is_native = 0, 1, False

    def all_reduce(self, x: Tensor) -> None:
        pass

    def all_gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        into[0].copy_(x)

    gather = all_gather

    def broadcast(self, x: Tensor) -> None:
        pass

    def send_next(self, x: Tensor) -> None:
        raise AssertionError("a group of one has no next rank")

    receive_previous = send_next

    def counts(self) -> dict[str, Count]:
        return {}

    def close(self) -> None:
        pass
