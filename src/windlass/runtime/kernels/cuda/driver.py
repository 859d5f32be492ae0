"""CUDA C++ compiled at run time by NVRTC (which comes with torch) and launched through the driver API.

Knows no operation. A kernel may start while the previous one on the stream still runs (programmatic dependent launch): each waits with
`griddepcontrol.wait` before it reads earlier results, and prefetches weights before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.errors import Error
from windlass.runtime.kernels.build import cache_folder

SOURCES = Path(__file__).parent / "sources"
MAX_SHARED_ATTRIBUTE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
CARVEOUT_ATTRIBUTE = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent."""
DEPENDENT_LAUNCH = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

MAP_BYTES, MAP_ALIGNMENT = 128, 64
"""Of a CUtensorMap."""
HOPPER = 9
"""The first generation (major compute capability) that has it."""
DEPENDENT = True
"""Whether to use programmatic dependent launch; off, to time kernels one by one."""


@contextmanager
def dependent_launches(wanted: bool) -> Iterator[None]:
    """Within, dependent launch is used if `wanted` and DEPENDENT."""
    global DEPENDENT
    before = DEPENDENT
    DEPENDENT = before and wanted
    try:
        yield
    finally:
        DEPENDENT = before


DEFINES: dict[str, int] = {}
"""For every kernel compiled from now on; TRACE_AT is the address of a buffer for device.cuh's `trace`."""

Argument = Tensor | int | float | bytes | None


class CudaFailed(Error):
    """NVRTC or the CUDA driver failed."""


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Of the version that PyTorch was built with; with a CPU-only PyTorch, any version, for compiling without a GPU."""
    major = (torch.version.cuda or "*").split(".")[0]
    beside = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/libnvrtc.so.{major}"), reverse=True)
    for file in [Path(f"libnvrtc.so.{major}"), *beside]:
        with contextlib.suppress(OSError):
            # The library loads these by name, and they are only found next to it.
            for builtins in file.parent.glob("libnvrtc-builtins.so.*") if file.is_absolute() else ():
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(file))
    raise CudaFailed(
        "NVRTC not found, so CUDA kernels cannot be compiled; install torch with CUDA, or the nvidia-cuda-nvrtc package"
    )


def call(name: str, what: str, *arguments: object) -> None:
    """A function of the driver; raises CudaFailed with `what` where it fails."""
    _check(getattr(_driver(), name)(*arguments), what)


def address(name: str) -> int:
    """Of a function of the driver, for native code that calls it."""
    return ctypes.cast(getattr(_driver(), name), ctypes.c_void_p).value or 0


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise CudaFailed(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


@functools.cache
def source(name: str) -> str:
    """Of a file, after device.cuh, with what it includes from the same folder."""
    text = (SOURCES / "device.cuh").read_text() + (SOURCES / name).read_text()
    return re.sub(r'^#include "(\w+\.cuh)"$', lambda found: (SOURCES / found[1]).read_text(), text, flags=re.MULTILINE)


def architecture(device: torch.device | int | None = None) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def compile_cubin(text: str, defines: Mapping[str, int | str], target: str) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    # Without -default-device, generic lambdas are host functions.
    options = [
        f"--gpu-architecture={target}",
        "--std=c++17",
        "-default-device",
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaFailed(f"a CUDA kernel failed to compile for {target}: {log.value.decode()[:2000]}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


_EIGHT_BYTES = {"P": "Q", "Q": "Q", "I": "I4x", "f": "f4x"}
"""Arguments that are passed separately are eight bytes apart."""


def _packed_format(signature: str) -> str:
    """Of a structure in C: a tensor map has an alignment of its own, and so has what holds one."""
    fields = "@" + signature.replace("M", f"{MAP_BYTES}s") + "0Q"
    return f"{fields}{-struct.calcsize(fields) % MAP_ALIGNMENT}x" if "M" in signature else fields


class Unit(NamedTuple):
    """What is compiled at a time: a source file with its definitions."""

    name: str
    defines: tuple[tuple[str, int | str], ...]
    device: int

    def module(self) -> int:
        return _module(*self)


class Kernel:
    """A function on the device, compiled when it is first launched; `signature` has a letter per argument as in `struct`: P pointer, I u32,
    Q u64, f float, M a tensor map (of packed arguments, the first of them).

    A launch takes a few microseconds of Python: the driver's structures are allocated once and refilled. The driver copies them, and the call
    holds the GIL, so one kernel may be launched from several threads.
    """

    def __init__(self, unit: Unit, function: str, signature: str, packed: bool, shared_bytes: int = 0) -> None:
        """`packed`: the arguments are the fields of one structure passed by value."""
        self.unit, self._name, self._shared_bytes = unit, function, shared_bytes
        self._device = unit.device
        self._function: ctypes.c_void_p | None = None
        self._can_depend = torch.cuda.get_device_capability(unit.device)[0] >= HOPPER
        self._fields = struct.Struct(
            _packed_format(signature) if packed else "=" + "".join(_EIGHT_BYTES[kind] for kind in signature)
        )
        self._values = ctypes.create_string_buffer(self._fields.size)
        start = ctypes.addressof(self._values)
        places = [start] if packed else [start + 8 * number for number in range(len(signature))]
        self._pointers = (ctypes.c_void_p * len(places))(*places)
        self._attribute = _Attribute(id=DEPENDENT_LAUNCH, value=1)
        self._config = _Config(attributes=ctypes.addressof(self._attribute))
        self._config.block[1] = self._config.block[2] = 1
        self._config_at = ctypes.byref(self._config)

    def __call__(
        self, grid: Sequence[int], threads: int, *arguments: Argument, shared_bytes: int = 0, dependent: bool | None = None
    ) -> None:
        if _collected is not None:
            _collected.add(self.unit)
            return
        values = [
            argument.data_ptr() if isinstance(argument, Tensor) else 0 if argument is None else argument for argument in arguments
        ]
        self._fields.pack_into(self._values, 0, *values)
        config = self._config
        config.grid[:] = (*grid, *(1,) * (3 - len(grid)))
        config.block[0] = threads
        config.shared_bytes = shared_bytes
        config.stream = torch._C._cuda_getCurrentRawStream(self._device)
        config.num_attributes = self._can_depend and (DEPENDENT if dependent is None else dependent)
        status = _launch()(self._config_at, self._function or self._load(), self._pointers, None)
        if status:
            _check(status, "launching a kernel")

    @property
    def function(self) -> int:
        """The driver's handle, for native code that launches it."""
        return (self._function or self._load()).value or 0

    def _load(self) -> ctypes.c_void_p:
        name, handle = self.unit.name, ctypes.c_void_p()
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(handle), ctypes.c_void_p(self.unit.module()), self._name.encode()),
            f"looking up {self._name} in {name}",
        )
        if self._shared_bytes > 48 * 1024:
            _check(
                _driver().cuFuncSetAttribute(handle, MAX_SHARED_ATTRIBUTE, self._shared_bytes),
                f"requesting {self._shared_bytes} bytes of shared memory for {name}",
            )
        # A multiprocessor must drain before it changes its shared memory carveout, which prevents overlap: all kernels use the same.
        _check(_driver().cuFuncSetAttribute(handle, CARVEOUT_ATTRIBUTE, 100), f"setting the shared memory carveout of {name}")
        self._function = handle
        return handle


@functools.cache
def _launch() -> Callable[..., int]:
    return ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx


@functools.cache
def _digest(text: str) -> str:
    """A hundred kernels are compiled from a dozen texts."""
    return hashlib.sha256(text.encode()).hexdigest()


def _cubin(text: str, defines: Mapping[str, int | str], target: str) -> bytes:
    """From the disk cache, if the same compiler compiled it before."""
    version = (ctypes.c_int * 2)()
    _nvrtc().nvrtcVersion(ctypes.byref(version), ctypes.byref(version, ctypes.sizeof(ctypes.c_int)))
    key = hashlib.sha256(repr((_digest(text), sorted(defines.items()), target, tuple(version))).encode()).hexdigest()
    file = cache_folder() / f"{key[:32]}.cubin"
    with contextlib.suppress(OSError):
        return file.read_bytes()
    image = compile_cubin(text, defines, target)
    with contextlib.suppress(OSError):  # a full or read-only disk only costs time
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as made:
            made.write(image)
        Path(made.name).replace(file)
    return image


@functools.cache
def _module(name: str, defines: tuple[tuple[str, int | str], ...], device: int) -> int:
    image = _cubin(source(name), {**dict(defines), **DEFINES}, architecture(device))
    module = ctypes.c_void_p()
    torch.cuda.current_stream(device).synchronize()  # makes sure that a context exists
    _check(_driver().cuModuleLoadData(ctypes.byref(module), image), f"loading {name}")
    return module.value or 0


@functools.cache
def kernel(
    name: str, signature: str, function: str = "run", *, packed: bool = True, shared_bytes: int = 0, **defines: int
) -> Kernel:
    """A function of the source file `name`, with `defines`, for the current device."""
    words: dict[str, int | str] = {**defines}
    if function == "run":  # a name that profilers can tell apart
        function = f"{Path(name).stem}_{defines.get('KIND', 'run')}"
        words["run"] = function
    unit = Unit(name, tuple(sorted(words.items())), torch.cuda.current_device())
    return Kernel(unit, function, signature, packed, shared_bytes)


_collected: set[Unit] | None = None


@contextmanager
def collecting() -> Iterator[set[Unit]]:
    """Within, no kernel is launched: what their launches need is noted, to be compiled together. Results are whatever was in memory."""
    global _collected
    before, _collected = _collected, set()
    try:
        yield _collected
    finally:
        _collected = before


def is_collecting() -> bool:
    return _collected is not None


def compile_all(units: Collection[Unit]) -> None:
    """Several at a time: the compiler uses one core for each."""

    def one(unit: Unit) -> None:
        torch.cuda.set_device(unit.device)  # threads have no device of their own
        unit.module()

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(one, units):
            pass


UINT8, UINT64, NO_INTERLEAVE, NO_SWIZZLE, SWIZZLE_128, PROMOTE_256, NO_FILL = 0, 4, 0, 0, 3, 3, 0
"""CU_TENSOR_MAP_*."""
NO_MAP = bytes(MAP_BYTES)
_maps: dict[tuple[int, int, int, int, int], Tensor] = {}


def rows_map(data: Tensor, rows: int) -> Tensor:
    """A tensor map of `data` [matrices, tiles, blocks, block bytes], for copies of one block of `rows` tiles. On the device."""
    matrices, tiles, blocks, block_bytes = data.shape
    key = (data.data_ptr(), matrices * tiles, blocks, block_bytes, rows)
    if key not in _maps:
        _maps[key] = _make_rows_map(*key).to(data.device)
    return _maps[key]


def _make_rows_map(address: int, tiles: int, blocks: int, block_bytes: int, rows: int) -> Tensor:
    made = _encoded(
        UINT64, NO_SWIZZLE, address, (blocks * block_bytes // 8, tiles), blocks * block_bytes, (block_bytes // 8, rows)
    )
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


@functools.lru_cache(maxsize=4096)
def box_map(address: int, rows: int, row_bytes: int, width: int, height: int) -> bytes:
    """A tensor map of rows of bytes, one after another, for copies of `height` of them and `width` bytes of each, swizzled. Passed by value: rows
    of activations lie elsewhere in every graph, and a graph that is being captured cannot copy a map to the device."""
    return _encoded(UINT8, SWIZZLE_128, address, (row_bytes, rows), row_bytes, (width, height))


def _encoded(kind: int, swizzle: int, address: int, sizes: tuple[int, int], stride: int, box: tuple[int, int]) -> bytes:
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    at = -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), kind, 2, ctypes.c_void_p(address), (ctypes.c_uint64 * 2)(*sizes), (ctypes.c_uint64 * 1)(stride),
        (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1), NO_INTERLEAVE, swizzle, PROMOTE_256, NO_FILL,
    )  # fmt: skip
    _check(status, "describing a tensor to the copy engine")
    return ctypes.string_at(at, MAP_BYTES)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        *((f"from_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_uint))),
        *((f"from_{name}", ctypes.c_void_p) for name in ("host", "device", "array")),
        ("from_pitch", ctypes.c_size_t),
        *((f"to_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_uint))),
        *((f"to_{name}", ctypes.c_void_p) for name in ("host", "device", "array")),
        ("to_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


HOST_MEMORY, DEVICE_MEMORY = 1, 2
"""CU_MEMORYTYPE_*."""


def copy_rows(source: Tensor, out: Tensor) -> None:
    """From pinned host memory, contiguous, to a part of each row of an array on the device, by the copy engine on the current stream.

    uint8 [matrices, rows, blocks, bytes]; rows of `out` may lie further apart, as matrices do.
    """
    matrices, rows, blocks, size = out.shape
    if not out.numel():
        return
    assert source.is_contiguous() and out.stride(0) == rows * out.stride(1) and out.stride(2) == size
    copy = _Copy2D(
        from_kind=HOST_MEMORY,
        from_host=source.data_ptr(),
        from_pitch=blocks * size,
        to_kind=DEVICE_MEMORY,
        to_device=out.data_ptr(),
        to_pitch=out.stride(1),
        width=blocks * size,
        height=matrices * rows,
    )
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
    _check(_driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), stream), "copying to the device")


@functools.cache
def num_processors(device: int = 0) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
