"""What a group of ranks can do together. Every rank of a group makes the same calls in the same order; none has a return value.

Tensors are contiguous, and of one shape on all ranks unless said otherwise. Nothing that is sent is code: only numbers, in places whose
size both sides know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class GroupLost(Exception):
    """A rank did not come to a collective, or its connection broke. Not the user's to mend: whoever runs the group makes a new one."""


class Count(msgspec.Struct, frozen=True, array_like=True):
    """Of one kind of collective, since the group began."""

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    """In it, waiting for other ranks included."""


class Group(Protocol):
    @property
    def rank(self) -> int:
        """Within the group, from 0."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def is_native(self) -> bool:
        """Whether what it does are operations that a program records (kernels/program/program.py), so that a replay does not stop for them."""
        ...

    def all_reduce(self, x: Tensor) -> None:
        """Every rank's `x` becomes the sum of all, the same bits on all of them."""
        ...

    def all_gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        """into[r] becomes the `x` of rank r, on every rank."""
        ...

    def gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        """On rank 0, into[r] becomes the `x` of rank r, which may be of another size on each; elsewhere `into` is not looked at."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Every rank's `x` becomes that of rank 0."""
        ...

    def send_next(self, x: Tensor) -> None:
        """To the rank after this one; after the last comes the first."""
        ...

    def take_previous(self, x: Tensor) -> None:
        """`x` becomes what the rank before this one sends."""
        ...

    def counts(self) -> dict[str, Count]:
        """By the name of the collective. Bytes are those of the numbers; what the network adds is not in them."""
        ...

    def close(self) -> None: ...


class SoloGroup:
    """One rank: its sums are whole, and there is nobody to tell. So nobody need ask how many ranks there are."""

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

    take_previous = send_next

    def counts(self) -> dict[str, Count]:
        return {}

    def close(self) -> None:
        pass
