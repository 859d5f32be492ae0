"""Native operations, run eagerly or recorded once and replayed with a single call.

An operation is a C++ function (runtime/kernels/native) with pointers, integers and floats. `emit` runs it, or, inside `record`, appends it to a
program. A replay needs no Python: addresses are fixed, and the number of rows is read from a counter that the caller refills. Knows no
model.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from windlass.core.ggml.grids import LENGTHS, grid
from windlass.runtime.kernels import build
from windlass.runtime.kernels.program.arena import Arena
from windlass.runtime.kernels.program.only_views import OnlyViews

MAX_DATA, MAX_INTS, MAX_FLOATS = 16, 16, 8


class _Op(ctypes.Structure):
    """Mirrors `Op` in native/program/program.h."""

    _fields_ = [
        ("run", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("data", ctypes.c_void_p * MAX_DATA),
        ("ints", ctypes.c_int64 * MAX_INTS),
        ("floats", ctypes.c_float * MAX_FLOATS),
        ("is_invariant", ctypes.c_int64),
        ("nanoseconds", ctypes.c_int64),
    ]


class Program:
    """A recorded list of operations. `run` replays it on the current contents of its buffers."""

    def __init__(self, arena: Arena) -> None:
        self.names: list[str] = []
        self._arena = arena
        self._ops: list[_Op] = []
        self._calls: list[tuple[int, Callable[[], None]]] = []
        """Python functions between operations: (index of the operation that follows, function)."""
        self._at_end: dict[Callable[[], None], None] = {}
        self._kept: list[Tensor] = []
        self._list: ctypes.Array[_Op] | None = None
        self._counter: Tensor | None = None

    def run(self, *, timed: bool = False) -> None:
        if self._list is None:
            self._list = (_Op * len(self._ops))(*self._ops)
        first = 0
        for before, function in self._calls:
            self._run(first, before, timed)
            function()
            first = before
        self._run(first, len(self._list), timed)

    def _run(self, first: int, last: int, timed: bool) -> None:
        assert self._list is not None
        _native().windlass_run(ctypes.byref(self._list, first * ctypes.sizeof(_Op)), last - first, int(timed))

    def seconds(self) -> list[tuple[str, float]]:
        """(operation, seconds of all timed runs so far), in order."""
        ops = self._list if self._list is not None else self._ops
        return [(name, op.nanoseconds / 1e9) for name, op in zip(self.names, ops, strict=True)]

    def scratch_bytes(self) -> int:
        return self._arena.num_bytes

    @property
    def num_calls(self) -> int:
        """How often a replay returns to Python (see `call`)."""
        return len(self._calls)

    def append(self, name: str, op: _Op, tensors: Sequence[Tensor | None]) -> None:
        if self._counter is not None:
            op.counter = self._counter.data_ptr()
        self.names.append(name)
        self._ops.append(op)
        # Intermediate results belong to the arena, which reuses them once Python drops them; all other tensors must outlive the program.
        self._kept += [tensor for tensor in tensors if tensor is not None and not self._arena.owns(tensor)]

    def append_call(self, function: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        """Tensors of the arena are aliased, so that their memory can be reused afterwards."""
        views = [self._arena.alias(tensor) if self._arena.owns(tensor) else tensor for tensor in tensors]
        counter = self._counter

        def call() -> None:
            rows = None if counter is None else int(counter)
            function(*(tensor[:rows] for tensor in views))

        self._calls.append((len(self._ops), call))

    def append_at_end(self, function: Callable[[], None]) -> None:
        self._at_end[function] = None

    def end(self) -> None:
        """Ends the recording."""
        self._calls += [(len(self._ops), function) for function in self._at_end]

    def count_rows_by(self, counter: Tensor | None) -> Tensor | None:
        if counter is not None:
            self._kept.append(counter)
        previous, self._counter = self._counter, counter
        return previous


_local = threading.local()


def _recording() -> Program | None:
    return getattr(_local, "program", None)


@contextmanager
def record(counter: Tensor, arena: Arena | None = None) -> Iterator[Program]:
    """Operations emitted inside are recorded, not run. `counter` (int32 [1]) holds the number of rows at every replay.

    A PyTorch computation raises NotRecordable, since a replay would skip it. Programs that never run concurrently may share an arena.
    """
    program = Program(arena or Arena())
    program.count_rows_by(counter)
    _local.program = program
    try:
        with torch.no_grad(), OnlyViews():
            yield program
        program.end()
    finally:
        _local.program = None


@contextmanager
def rows_counted_by(counter: Tensor) -> Iterator[None]:
    """Operations inside have another number of rows (those whose logits are needed). No effect outside of `record`."""
    program = _recording()
    if program is None:
        yield
        return
    previous = program.count_rows_by(counter)
    try:
        yield
    finally:
        program.count_rows_by(previous)


@contextmanager
def batch_invariant(wanted: bool = True) -> Iterator[None]:
    """Operations that are run or recorded inside give a row the same bits however many rows there are, which takes them longer. Operations of
    PyTorch promise no such thing."""
    previous, _local.invariant = is_invariant(), wanted or is_invariant()
    try:
        yield
    finally:
        _local.invariant = previous


def is_invariant() -> bool:
    return getattr(_local, "invariant", False)


def is_recording() -> bool:
    return _recording() is not None


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """An output buffer: in the arena of the program being recorded, or ordinary memory."""
    program = _recording()
    if program is None:
        return torch.empty(tuple(shape), dtype=dtype)
    return program._arena.empty(tuple(shape), dtype)


def empty_on(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same on any device, for results of `call`."""
    return empty(shape, dtype) if device.type == "cpu" else torch.empty(tuple(shape), dtype=dtype, device=device)


def emit(
    name: str,
    tensors: Sequence[Tensor | None],
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
    *,
    rows: int,
    counted: bool = True,
) -> None:
    """Runs or records the operation NAME. `rows`: the current number of rows, or the maximum. `counted` False: always exactly that many."""
    op = _Op(run=find(name), num_rows=rows, is_invariant=int(is_invariant()))
    for index, tensor in enumerate(tensors):
        op.data[index] = None if tensor is None else tensor.data_ptr()
    op.ints[: len(ints)] = list(ints)
    op.floats[: len(floats)] = list(floats)
    program = _recording()
    if program is None:
        _native().windlass_run(ctypes.byref(op), 1, 0)
        return
    program.append(name, op, tensors)
    if not counted:
        op.counter = None


def call(function: Callable[..., None], *tensors: Tensor) -> None:
    """Runs or records `function` on the actual rows of `tensors`, for what is not a native operation, such as torch.distributed collectives.

    A replay returns to Python for it. Its results must be written to those tensors.
    """
    program = _recording()
    if program is None:
        function(*tensors)
    else:
        program.append_call(function, tensors)


def at_end(function: Callable[[], None]) -> None:
    """Runs `function` now, or at the end of every replay, once: for errors that native operations cannot raise."""
    program = _recording()
    if program is None:
        function()
    else:
        program.append_at_end(function)


def usable(*tensors: Tensor | None) -> bool:
    """Whether native operations support these: on the CPU, and no gradient is needed."""
    present = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.device.type != "cpu" for tensor in present):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present):
        return False
    return available()


def available() -> bool:
    return build.library("native") is not None


@cache
def find(name: str) -> int:
    address = _native().windlass_find(name.encode())
    if not address:
        raise AssertionError(f"runtime/kernels/native has no operation {name!r}")
    return address


def _native() -> ctypes.CDLL:
    library = build.library("native")
    assert library is not None, "check `available()` first"
    return _prepared(library)


@cache
def _prepared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.windlass_find.restype = ctypes.c_void_p
    library.windlass_find.argtypes = [ctypes.c_char_p]
    library.windlass_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.windlass_run.restype = None
    library.windlass_ggml_grids(b"".join(grid(name) for name in LENGTHS))
    library.windlass_threads(num_threads())
    return library


def num_threads() -> int:
    """WINDLASS_THREADS, else one per physical core this process may use (hyperthreads share what kernels are bound by)."""
    setting = os.environ.get("WINDLASS_THREADS", "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    usable_cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core(cpu) for cpu in usable_cpus}
    return max(len(cores), 1)


def set_threads(count: int) -> None:
    _native().windlass_threads(count)


def rest() -> None:
    """Lets the threads sleep at once, not after a while: the caller waits for something that needs the cores, such as a disk."""
    if available():
        _native().windlass_rest()


def _core(cpu: int) -> tuple[str, str]:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
    except OSError:
        return str(cpu), ""
