"""Which functions a CUDA source compiles to: as it was when it was last compiled, or found out by compiling it.

Compiling takes a second a unit, and gives the same for the same text, defines, options and compiler. Those that are known to compile are
kept in tests/data/cuda_compiled.json, which tests/data/make_cuda_compiled.py makes; whatever has changed since is compiled.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from windlass.runtime.kernels.cuda import driver

KEPT = Path(__file__).parents[3] / "data" / "cuda_compiled.json"


def functions_of(file: str, defines: Mapping[str, int], target: str) -> set[str]:
    kept = _kept().get(digest(file, defines, target))
    return compiled(file, defines, target) if kept is None else set(kept)


def compiled(file: str, defines: Mapping[str, int], target: str) -> set[str]:
    image = driver.compile_cubin(driver.source(file), dict(defines), target)
    return {name.decode() for name in re.findall(rb"\.text\.(\w+)\0", image)}


def digest(file: str, defines: Mapping[str, int], target: str) -> str:
    """Of all that a compiler's answer hangs on."""
    options = inspect.getsource(driver.compile_cubin)
    told = [driver.source(file), sorted(defines.items()), target, options, version()]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


@cache
def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver._nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def _kept() -> dict[str, list[str]]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}
