"""A group of ranks whose talk is native (native/links/): operations like all others, recorded and replayed without Python.

Bytes go through memory where two ranks share some, and through a socket elsewhere. Who the ranks are and how they met, others know.
A rank that is missed is noticed in the middle of a program; whatever follows does nothing, and the end of the run raises.
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

from windlass.kernels import build
from windlass.kernels.program import program

COLLECTIVES = ("all_reduce", "embedding", "logits", "all_gather", "gather", "broadcast", "send_next", "take_previous")
"""As `Collective` in native/links/links.h numbers them."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
"""As `NumberType` in native/links/links.h; others can be passed on, and not added."""
SPIN_SECONDS = 100e-6
"""A rank that shares memory is seldom further behind. On sockets, and where ranks outnumber cores, whoever waits lets others compute."""
SPIN_SECONDS_ELSEWHERE = 5e-6


class Wires(Protocol):
    """What links are made of (parallel/join.py)."""

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

    def __init__(self, wires: Wires) -> None:
        self.rank, self.size = wires.rank, len(wires.sockets)
        self._lost, self._may_round = wires.lost, int(wires.sync == "int8")
        self._sockets = [*wires.sockets, *wires.second]
        self._handle = _opened(wires)
        for descriptor in wires.memory:
            if descriptor is not None:
                os.close(descriptor)  # what is mapped stays
        weakref.finalize(self, _native().windlass_links_close, self._handle).atexit = False  # other threads may still be in it
        self._check()

    # --- what every group does

    def all_reduce(self, x: Tensor) -> None:
        if x.dtype not in TYPES:
            raise TypeError(f"numbers of type {x.dtype} are not added between ranks; {', '.join(map(str, TYPES))} are")
        rows, width = _rows(x)
        self._emit("link_sum", [x], [width, TYPES[x.dtype], self._may_round], rows, x)

    def all_gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        whole = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._emit("link_all_gather", [x, whole], [_bytes(x)], 1, None)
        for to, part in zip(into, whole, strict=True):
            to.copy_(part)

    def gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        if self.rank:
            self._pass(x, 0, "gather", is_taken=False)
            return
        into[0].copy_(x)
        for rank in range(1, self.size):
            self._pass(into[rank], rank, "gather", is_taken=True)

    def broadcast(self, x: Tensor) -> None:
        self._emit("link_broadcast", [x], [_bytes(x)], 1, None)

    def send_next(self, x: Tensor) -> None:
        self._pass(x, (self.rank + 1) % self.size, "send_next", is_taken=False)

    def take_previous(self, x: Tensor) -> None:
        self._pass(x, (self.rank - 1) % self.size, "take_previous", is_taken=True)

    def counts(self) -> dict[str, Any]:
        """By collective; of those that there were."""
        found = (ctypes.c_int64 * (4 * len(COLLECTIVES)))()
        _native().windlass_links_counts(self._handle, found)
        rows = {name: found[4 * number : 4 * number + 4] for number, name in enumerate(COLLECTIVES)}
        return {name: LinkCount(*row[:3], row[3] / 1e9) for name, row in rows.items() if row[0]}

    def close(self) -> None:
        """The others notice. May be called twice."""
        _native().windlass_links_end(self._handle)
        for connection in self._sockets:
            if connection is not None:
                connection.close()

    # --- what ranks do that share a vocabulary

    def localize(self, tokens: Tensor, interval: tuple[int, int]) -> Tensor:
        """Tokens as rows of this rank's part of the table; others' as any of them."""
        local = program.empty(tokens.shape, tokens.dtype)
        is_wide = int(tokens.dtype == torch.int64)
        program.emit("link_localize", [local, tokens], [*interval, is_wide], rows=tokens.shape[0])
        return local

    def exchange_rows(self, rows: Tensor, tokens: Tensor, starts: Tensor) -> None:
        """rows[i] becomes that of the rank which has tokens[i]. `starts`: int32 [size + 1], see `starts_of`."""
        ints = [rows.shape[1], TYPES[rows.dtype], self._may_round, int(tokens.dtype == torch.int64)]
        self._emit("link_rows", [rows, tokens, starts], ints, rows.shape[0], rows)

    def gather_logits(self, part: Tensor, whole: Tensor, starts: Tensor, candidates: Tensor | None) -> None:
        """On rank 0, `whole` becomes all ranks' parts side by side; where a step wants only the largest, all else is minus infinity."""
        self._emit("link_logits", [part, whole, starts, candidates], [part.element_size()], part.shape[0], part)

    def send_next_logits(self, x: Tensor, candidates: Tensor | None) -> None:
        self._pass_logits(x, candidates, self.rank + 1, "send_next", is_taken=False)

    def take_previous_logits(self, x: Tensor, candidates: Tensor | None) -> None:
        self._pass_logits(x, candidates, self.rank - 1, "take_previous", is_taken=True)

    # --- how

    def _pass(self, x: Tensor, other: int, name: str, *, is_taken: bool) -> None:
        rows, width = _rows(x)
        ints = [width * x.element_size(), other, COLLECTIVES.index(name), int(is_taken)]
        self._emit("link_pass", [x], ints, rows, x)

    def _pass_logits(self, x: Tensor, candidates: Tensor | None, other: int, name: str, *, is_taken: bool) -> None:
        ints = [x.element_size(), x.shape[1], other % self.size, COLLECTIVES.index(name), int(is_taken)]
        self._emit("link_pass_logits", [x, candidates], ints, x.shape[0], x)

    def _emit(self, name: str, tensors: Sequence[Tensor | None], ints: list[int], rows: int, counted: Tensor | None) -> None:
        """`counted`: what has so many rows, where their number is counted at every replay."""
        assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), "only whole memory travels"
        has_rows = counted is not None and counted.dim() > 1
        program.emit(name, tensors, [self._handle, *ints], rows=rows, counted=has_rows)
        program.afterwards(self._check)

    def _check(self) -> None:
        words = _native().windlass_links_lost(self._handle)
        if words is not None:
            raise self._lost(f"rank {self.rank} of {self.size} lost another: {words.decode()}")


class _Maker:
    """Makes groups of wires, as parallel/join.py asks for them."""

    def available(self) -> bool:
        return program.available()

    def __call__(self, wires: Wires) -> LinkGroup:
        return LinkGroup(wires)


make_links = _Maker()


def starts_of(intervals: Sequence[tuple[int, int]]) -> Tensor:
    """Where each rank's part begins, and where the last one's ends. They lie one after another."""
    return torch.tensor([first for first, _ in intervals] + [intervals[-1][1]], dtype=torch.int32)


def _rows(x: Tensor) -> tuple[int, int]:
    """Rows, and numbers in each. A vector is one row."""
    if x.dim() < 2:
        return 1, x.numel()
    return x.shape[0], x.numel() // max(x.shape[0], 1)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _opened(wires: Wires) -> int:
    size = len(wires.sockets)
    sockets, second = (
        (ctypes.c_int * size)(*(-1 if found is None else found.fileno() for found in part))
        for part in (wires.sockets, wires.second)
    )
    memory = (ctypes.c_int * size)(*(-1 if found is None else found for found in wires.memory))
    spin = SPIN_SECONDS if wires.is_local and not wires.is_crowded else SPIN_SECONDS_ELSEWHERE
    return _native().windlass_links_open(
        wires.rank, size, sockets, second, memory, wires.timeout_seconds, spin, int(wires.is_local)
    )


@cache
def _native() -> ctypes.CDLL:
    library = build.library("native")
    assert library is not None, "ask `program.available()` first"
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
