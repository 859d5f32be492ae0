"""Compiles the Triton kernels for GPUs that are not here, as every case of their tests launches them, and says what each takes.

Run: PYTHONPATH=src python bench/kernels/triton_compile.py [80|90|...] [--only=WORDS]. Needs triton and no GPU: launches end at the machine code.
Nothing is computed, so nothing is compared. A kernel that does not compile, or takes more shared memory than the smallest chip of
that generation has, fails.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["WINDLASS_NO_NATIVE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "runtime" / "kernels" / "triton"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

FP8_CAPABILITY = 89
"""From this on Triton has e4m3; `--kv fp8` is refused before."""
SMALLEST_SHARED_BYTES = 99 * 1024
"""Ampere and Ada chips for games and workstations; data-centre chips have more."""


class NoDevice:
    """What triton asks a driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compiles_only(capability: int, found: dict[str, Any]) -> None:
    driver.set_active(NoDevice(capability))
    run = _RUN

    def warmed(self: Any, *inputs: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        started = time.perf_counter()
        made = run(self, *inputs, grid=grid, warmup=True, **how)
        if made.hash not in found:
            found[made.hash] = made
            ptx, shared = made.asm["ptx"], made.metadata.shared
            uses = {
                name: ptx.count(text) for name, text in (("wgmma", "wgmma.mma"), ("mma", "mma.sync"), ("async", "cp.async.c"))
            }
            told = ", ".join(f"{count} {name}" for name, count in uses.items() if count)
            print(
                f"sm_{capability} {self.__name__:10} {time.perf_counter() - started:5.1f} s {shared / 1024:5.0f} KB shared {told}"
            )
            assert shared <= SMALLEST_SHARED_BYTES, f"{self.__name__} takes {shared} bytes of shared memory: {how}"
        return made

    jit.JITFunction.run = warmed


_RUN = jit.JITFunction.run


def main() -> int:
    from triton_cases import CASES, LARGE

    words = [word for word in sys.argv[1:] if word.startswith("--only=")]
    only = words[0].removeprefix("--only=") if words else ""
    capability = next((int(word) for word in sys.argv[1:] if word.isdigit()), 90)  # one to a process: what is compiled is kept
    failed = 0
    found: dict[str, Any] = {}
    compiles_only(capability, found)
    for name, check in {**CASES, **LARGE}.items():
        if "fp8 cache" in name and capability < FP8_CAPABILITY:
            continue
        if only not in name or "long" in name:
            continue
        try:
            check("cpu")
        except AssertionError as error:
            failed += _is_ours(error)
        except Exception as error:  # noqa: BLE001 (reported, and the next one is tried)
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[-600:]}")
            failed += 1
    print(f"sm_{capability}: {len(found)} kernels, {failed} failed (triton {triton.__version__})")
    return min(failed, 1)


def _is_ours(error: AssertionError) -> bool:
    """Results are rubbish, which the cases say; only what is said here counts."""
    ours = "shared memory" in str(error)
    if ours:
        print(f"FAILED {error}")
    return ours


if __name__ == "__main__":
    sys.exit(main())
