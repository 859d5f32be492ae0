"""The CPU's share of routed layers beside a GPU: threads that wait for the device's questions (runtime/kernels/native/tiles/share.cpp)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from windlass.errors import Impossible
from windlass.runtime.kernels import build
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.tiered import ITEMS_AT, MAX_ROWS, ROWS_AT, sums_at
from windlass.runtime.kernels.program import program
from windlass.runtime.machine.bandwidth import second_level_bytes

AHEAD_SHARE = 1 / 2
"""Of a thread's second-level cache, for experts that are guessed: what is computed meanwhile passes through it too."""


class _Shape(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("hidden", "width", "group", "blocks", "max_rows", "threads", "num_layers", "plain")
        ),
        *((name, ctypes.c_int64) for name in ("num_experts", "ahead_bytes")),
        ("mailbox", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("items_at", "rows_at", "sums_at")),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("disk", ctypes.c_void_p),
        ("disk_experts", ctypes.c_int64),
    ]


class ShareCounts(NamedTuple):
    busy_seconds: float
    num_bytes: int
    """Of weights."""
    ahead_bytes: int = 0
    """Fetched into caches before they were asked for."""


class DiskForm(Protocol):
    @property
    def num_experts(self) -> int: ...


class DiskPart(Protocol):
    """A cache of experts in a file (cache.py); it outlives the share."""

    handle: ctypes.c_void_p

    @property
    def form(self) -> DiskForm: ...


def library() -> ctypes.CDLL | None:
    """None: no compiler, so that the CPU cannot take part."""
    found = build.library("tiles")
    if found is not None:
        found.share_start.restype = ctypes.c_void_p
    return found


class CpuShare:
    """Answers from its making until it is closed or forgotten."""

    def __init__(
        self,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        shape: Tiles,
        mailbox: Tensor,
        blocks: int,
        *,
        threads: int | None = None,
        ahead_bytes: int | None = None,
        plain: bool = False,
        disk: DiskPart | None = None,
    ) -> None:
        """`gate_up`, `down`: of each layer, the experts in host memory; `shape`: of gate and up; `blocks`: the CPU's part; `disk`: experts in a file,
        of which it computes all.

        `ahead_bytes`: what a thread fetches of a guess at most; as much as its caches hold, unless said.
        `plain`: rows of an expert are multiplied together as matrix instructions do it, without these; for tests.
        """
        self._lib = library()
        assert self._lib is not None
        self._kept = (mailbox, gate_up, down, disk)
        self._bases = [(ctypes.c_void_p * len(layers))(*(layer.data_ptr() for layer in layers)) for layers in (gate_up, down)]
        self.shape = _Shape(
            hidden=shape.inputs,
            width=shape.rows // 2,
            group=shape.group,
            blocks=blocks,
            max_rows=MAX_ROWS,
            threads=threads or default_threads(),
            num_layers=len(gate_up),
            plain=plain,
            num_experts=gate_up[0].shape[0],
            ahead_bytes=int(second_level_bytes() * AHEAD_SHARE) if ahead_bytes is None else ahead_bytes,
            mailbox=mailbox.data_ptr(),
            items_at=ITEMS_AT,
            rows_at=ROWS_AT,
            sums_at=sums_at(shape.inputs),
            gate_up=ctypes.addressof(self._bases[0]),
            down=ctypes.addressof(self._bases[1]),
            disk=None if disk is None else disk.handle,
            disk_experts=0 if disk is None else disk.form.num_experts,
        )
        self._handle = ctypes.c_void_p(self._lib.share_start(ctypes.byref(self.shape)))
        if not self._handle:
            raise Impossible(
                f"{self.shape.threads} threads for the CPU's part of the experts cannot be started; set WINDLASS_THREADS"
            )
        self.close = weakref.finalize(self, _stop, self._lib, self._handle)

    @property
    def counts(self) -> ShareCounts:
        busy, num_bytes, ahead = ctypes.c_double(), ctypes.c_uint64(), ctypes.c_uint64()
        self._lib.share_counts(self._handle, *map(ctypes.byref, (busy, num_bytes, ahead)))
        return ShareCounts(busy.value, num_bytes.value, ahead.value)

    def ask(self) -> None:
        """As the device does, and waits for the answer."""
        self._lib.share_ask(ctypes.byref(self.shape))


def _stop(lib: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
    """A step that is under way gets its answers first: the device would wait for them."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    lib.share_stop(handle)


def default_threads() -> int:
    """One core is left to the thread that drives the device."""
    return max(1, program.num_threads() - 1)
