"""Imports of torch: without garbage collections, its libraries loaded meanwhile. Nothing here imports it."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

GLOBAL, LOCAL = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL),), (("libtorch_cpu.so", 0), ("libtorch_cuda.so", 0))
"""In the order and with the visibility that `import torch` gives them. None of these calls Python."""
NVIDIA = Path("/dev/nvidiactl")
"""There where an NVIDIA driver is."""


@contextmanager
def importing() -> Generator[None]:
    """For imports of torch: no collection while it is imported, and none looks at it later. Nothing changes where it was imported before.

    Torch's modules are half a million objects. Measured: 1.0 s of CPU instead of 1.5 s from `import torch` to the end of the process,
    which would otherwise search all of them once more.
    """
    if "torch" in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def load_ahead(tell: Callable[[str], None] = lambda what: None) -> list[Thread]:
    """Begins to load PyTorch's libraries, and to initialize CUDA's driver where there is one: that takes as long as importing modules, and needs
    no lock of Python's, which `import torch` would hold meanwhile. What cannot be loaded is left to `import torch`, which says why.

    `tell` is called when something is done."""
    if not sys.platform.startswith("linux") or "torch" in sys.modules:
        return []
    threads = [
        Thread(target=_load, args=(libraries(), tell), daemon=True),
        Thread(target=_initialize_driver, args=(tell,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def libraries() -> list[tuple[Path, int]]:
    """Those that are there, and their visibility."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return []
    folder = Path(found.submodule_search_locations[0]) / "lib"
    return [(folder / name, visibility) for name, visibility in GLOBAL + LOCAL if (folder / name).is_file()]


def _load(files: list[tuple[Path, int]], tell: Callable[[str], None]) -> None:
    # ctypes.CDLL(file) would hold Python's lock; a function that it calls does not.
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    for file, visibility in files:
        load(bytes(file), os.RTLD_NOW | visibility)
    tell("PyTorch's libraries loaded")


def _initialize_driver(tell: Callable[[str], None]) -> None:
    """No context is made: which device is used is not known yet."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)
        tell("CUDA's driver initialized")


def beside_libraries() -> tuple[str, ...]:
    """Modules to import meanwhile, which do not import torch and are needed later anyway."""
    return ("numpy", "triton") if NVIDIA.exists() else ("numpy",)
