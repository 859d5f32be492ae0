"""A process group with native collectives (native/links/): operations like all others, recorded and replayed without Python.

Bytes go through shared memory between ranks of one machine, and through sockets otherwise. Knows nothing of rendezvous.
When a rank is lost in the middle of a program, the remaining collectives do nothing, and the end of the run raises.
"""

from __future__ import annotations

import ctypes
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from windlass.runtime.kernels import build
from windlass.runtime.kernels.program import program

COLLECTIVES = ("all_reduce", "embedding", "logits", "all_gather", "gather", "broadcast", "send_next", "receive_previous")
"""As `Collective` in native/links/links.h numbers them."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
"""As `NumberType` in native/links/links.h; other types can be sent, but not summed."""
SPIN_SECONDS = 100e-6
"""Busy waiting before sleeping: ranks that share memory are seldom further apart. Over sockets, and where ranks outnumber cores, less."""
SPIN_SECONDS_ELSEWHERE = 5e-6


class LinkEndpoints(Protocol):
    """The connections that links are made of (runtime/parallel/join.py: PeerConnections)."""

    @property
    def rank(self) -> int: ...
    @property
    def sockets(self) -> Sequence[socket.socket | None]: ...
    @property
    def second(self) -> Sequence[socket.socket | None]: ...
    @property
    def memory(self) -> Sequence[int | None]: ...
    @property
    def sync(self) -> str: ...
    @property
    def timeout_seconds(self) -> float: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def is_crowded(self) -> bool: ...
    @property
    def lost(self) -> Callable[[str], Exception]: ...


class LinkCount(NamedTuple):
    calls: int
    sent_bytes: int
    received_bytes: int
    seconds: float


class LinkGroup:
    is_native = True

    def __init__(self, peers: LinkEndpoints) -> None:
        self.rank, self.size = peers.rank, len(peers.sockets)
        self._lost, self._may_round = peers.lost, int(peers.sync == "int8")
        self._sockets = [*peers.sockets, *peers.second]
        self._handle = _opened(peers)
        for descriptor in peers.memory:
            if descriptor is not None:
                os.close(descriptor)  # the mapping stays
        weakref.finalize(self, _native().windlass_links_close, self._handle).atexit = False  # other threads may still use it
        self._check()

    # --- the Group interface

    def all_reduce(self, x: Tensor) -> None:
        if x.dtype not in TYPES:
            raise TypeError(f"all_reduce does not support {x.dtype}; use one of {', '.join(map(str, TYPES))}")
        rows, width = _rows(x)
        self._emit("link_sum", [x], [width, TYPES[x.dtype], self._may_round], rows, x)

    def all_gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        whole = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._emit("link_all_gather", [x, whole], [_bytes(x)], 1, None)
        for to, part in zip(into, whole, strict=True):
            to.copy_(part)

    def gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        if self.rank:
            self._pass(x, 0, "gather", receives=False)
            return
        into[0].copy_(x)
        for rank in range(1, self.size):
            self._pass(into[rank], rank, "gather", receives=True)

    def broadcast(self, x: Tensor) -> None:
        self._emit("link_broadcast", [x], [_bytes(x)], 1, None)

    def send_next(self, x: Tensor) -> None:
        self._pass(x, (self.rank + 1) % self.size, "send_next", receives=False)

    def receive_previous(self, x: Tensor) -> None:
        self._pass(x, (self.rank - 1) % self.size, "receive_previous", receives=True)

    def counts(self) -> dict[str, Any]:
        """By collective, of those that were called."""
        totals = (ctypes.c_int64 * (4 * len(COLLECTIVES)))()
        _native().windlass_links_counts(self._handle, totals)
        rows = {name: totals[4 * number : 4 * number + 4] for number, name in enumerate(COLLECTIVES)}
        return {name: LinkCount(*row[:3], row[3] / 1e9) for name, row in rows.items() if row[0]}

    def close(self) -> None:
        """The other ranks get GroupLost. Idempotent."""
        _native().windlass_links_end(self._handle)
        for connection in self._sockets:
            if connection is not None:
                connection.close()

    # --- vocabulary parallelism

    def localize(self, tokens: Tensor, interval: tuple[int, int]) -> Tensor:
        """Tokens as rows of this rank's part of the table; tokens of other ranks are clamped into it."""
        local = program.empty(tokens.shape, tokens.dtype)
        is_wide = int(tokens.dtype == torch.int64)
        program.emit("link_localize", [local, tokens], [*interval, is_wide], rows=tokens.shape[0])
        return local

    def exchange_rows(self, rows: Tensor, tokens: Tensor, starts: Tensor) -> None:
        """rows[i] is replaced by that of the rank which holds tokens[i]. `starts`: int32 [size + 1], see `starts_of`."""
        ints = [rows.shape[1], TYPES[rows.dtype], self._may_round, int(tokens.dtype == torch.int64)]
        self._emit("link_rows", [rows, tokens, starts], ints, rows.shape[0], rows)

    def gather_logits(self, part: Tensor, whole: Tensor, starts: Tensor, candidates: Tensor | None) -> None:
        """On rank 0, `whole` = all ranks' parts side by side; where a step needs only the largest, all others are minus infinity."""
        self._emit("link_logits", [part, whole, starts, candidates], [part.element_size()], part.shape[0], part)

    def send_next_logits(self, x: Tensor, candidates: Tensor | None) -> None:
        self._pass_logits(x, candidates, self.rank + 1, "send_next", receives=False)

    def receive_previous_logits(self, x: Tensor, candidates: Tensor | None) -> None:
        self._pass_logits(x, candidates, self.rank - 1, "receive_previous", receives=True)

    # --- implementation

    def _pass(self, x: Tensor, other: int, name: str, *, receives: bool) -> None:
        rows, width = _rows(x)
        ints = [width * x.element_size(), other, COLLECTIVES.index(name), int(receives)]
        self._emit("link_pass", [x], ints, rows, x)

    def _pass_logits(self, x: Tensor, candidates: Tensor | None, other: int, name: str, *, receives: bool) -> None:
        ints = [x.element_size(), x.shape[1], other % self.size, COLLECTIVES.index(name), int(receives)]
        self._emit("link_pass_logits", [x, candidates], ints, x.shape[0], x)

    def _emit(self, name: str, tensors: Sequence[Tensor | None], ints: list[int], rows: int, counted: Tensor | None) -> None:
        """`counted`: the tensor whose number of rows varies from replay to replay."""
        assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), "tensors must be contiguous"
        has_rows = counted is not None and counted.dim() > 1
        program.emit(name, tensors, [self._handle, *ints], rows=rows, counted=has_rows)
        program.at_end(self._check)

    def _check(self) -> None:
        message = _native().windlass_links_lost(self._handle)
        if message is not None:
            raise self._lost(f"rank {self.rank} of {self.size} lost a peer: {message.decode()}")


class _LinkFactory:
    """A LinkFactory of runtime/parallel/join.py."""

    def available(self) -> bool:
        return program.available()

    def __call__(self, peers: LinkEndpoints) -> LinkGroup:
        return LinkGroup(peers)


make_links = _LinkFactory()


def starts_of(intervals: Sequence[tuple[int, int]]) -> Tensor:
    """The first element of each rank's contiguous part, and the end of the last one's."""
    return torch.tensor([first for first, _ in intervals] + [intervals[-1][1]], dtype=torch.int32)


def _rows(x: Tensor) -> tuple[int, int]:
    """Number of rows and of elements in each. A vector is one row."""
    if x.dim() < 2:
        return 1, x.numel()
    return x.shape[0], x.numel() // max(x.shape[0], 1)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _opened(peers: LinkEndpoints) -> int:
    size = len(peers.sockets)
    sockets, second = (
        (ctypes.c_int * size)(*(-1 if each is None else each.fileno() for each in part)) for part in (peers.sockets, peers.second)
    )
    memory = (ctypes.c_int * size)(*(-1 if each is None else each for each in peers.memory))
    spin = SPIN_SECONDS if peers.is_local and not peers.is_crowded else SPIN_SECONDS_ELSEWHERE
    return _native().windlass_links_open(
        peers.rank, size, sockets, second, memory, peers.timeout_seconds, spin, int(peers.is_local)
    )


@cache
def _native() -> ctypes.CDLL:
    library = build.library("native")
    assert library is not None, "check `program.available()` first"
    library.windlass_links_open.restype = ctypes.c_void_p
    library.windlass_links_open.argtypes = [
        ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_double, ctypes.c_double, ctypes.c_int
    ]  # fmt: skip
    library.windlass_links_close.argtypes = [ctypes.c_void_p]
    library.windlass_links_end.argtypes = [ctypes.c_void_p]
    library.windlass_links_lost.argtypes = [ctypes.c_void_p]
    library.windlass_links_lost.restype = ctypes.c_char_p
    library.windlass_links_counts.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library
