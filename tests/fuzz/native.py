"""The C++ kernels that take bytes of files, compiled with AddressSanitizer and UndefinedBehaviorSanitizer, on mutated bytes.

    python tests/fuzz/native.py --inputs 100000 --seed 3
    python tests/fuzz/native.py --seed 3 --number 4711       one input again

Blocks of GGUF's types, packed integers with their scales, and weights of any bits (NaN, infinity, subnormal) go through packing, products,
lookups and quantization. The first error of a sanitizer ends the process; it is printed with the number of its input.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from windlass.runtime.kernels import build

LIBRARIES = ("native", "quantize")
SANITIZED = (
    "-O1",
    "-g1",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-w",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
RUNTIMES = ("libasan.so", "libubsan.so")
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
EXTREMES = (b"\0", b"\xff", b"\x7f", b"\x80", b"\x7f\x80", b"\xff\x80", b"\x7c\x00", b"\xfc\x00", b"\x00\x01", b"\x7f\xff")
"""Zero, NaN, infinities, the largest and the smallest numbers of several types."""


def runtimes() -> list[str]:
    """The compiler's own, to be loaded before Python; empty: it has none."""
    compiler = build._compiler()
    if compiler is None:
        return []
    found = [_printed([compiler, f"-print-file-name={name}"]) for name in RUNTIMES]
    return found if all(Path(path).is_absolute() for path in found) else []


def _printed(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def use_sanitized() -> None:
    """From here on `build` means libraries with sanitizers; they are cached like others, under the key of their flags."""
    build.LIBRARIES.update({name: dataclasses.replace(build.LIBRARIES[name], flags=SANITIZED) for name in LIBRARIES})


def compile_sanitized() -> None:
    """Without loading them, and without their runtime in the compiler. Minutes, the first time."""
    use_sanitized()
    compiler = build._compiler()
    assert compiler is not None
    for name in LIBRARIES:
        build._compiled_in(build.cache_folder(), build.LIBRARIES[name], compiler)


def run_inside(words: list[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """This file in a process with the runtimes."""
    environment = os.environ | OPTIONS | {"LD_PRELOAD": " ".join(runtimes()), "OMP_NUM_THREADS": "1", "WINDLASS_THREADS": "2"}
    command = [sys.executable, __file__, "--inside", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds, check=False)


# --- inside


def one(number: int, seed: int) -> None:
    import torch

    random = Random(f"native {seed} {number}")
    draw = torch.Generator().manual_seed(random.getrandbits(32))
    rows, kind = random.choice((1, 2, 15, 16, 17, 40)), random.choice(("blocks", "blocks", "words", "quantize"))
    if kind == "blocks":
        panels = _of_blocks(random, rows)
    elif kind == "words":
        panels = _of_words(random, rows)
    else:
        _quantize(random, rows)
        return
    from windlass.runtime.kernels.cpu import linear

    for count in (1, 3, 14):
        x = torch.randn(count, panels.shape[1], generator=draw)
        if random.random() < 0.3:
            x = _floats(random, x.numel(), torch.float32).view(x.shape)
        linear.linear(x, panels)
    linear.embed(torch.randint(0, rows, (5,), generator=draw), panels)


def _bytes(random: Random, count: int) -> Any:
    """uint8: at random, or of one extreme, or at random with extremes in between."""
    import torch

    kind = random.randrange(4)
    if kind == 0:
        data = (random.choice(EXTREMES) * (count // 1 + 1))[:count]
    else:
        data = random.randbytes(count)
        for _ in range(0 if kind == 1 else random.randrange(1, 40)):
            at, put = random.randrange(count), random.choice(EXTREMES)
            data = data[:at] + put + data[at + len(put) :]
    return torch.frombuffer(bytearray(data[:count]), dtype=torch.uint8)


def _floats(random: Random, count: int, dtype: Any) -> Any:
    return _bytes(random, count * dtype.itemsize).view(dtype)


def _of_blocks(random: Random, rows: int) -> Any:
    import torch

    from windlass.core.ggml.forms import FORMS
    from windlass.runtime.kernels.packing.panel_data import BLOCK, CODE_BYTES, GGML_NUMBERS
    from windlass.runtime.kernels.packing.panels import Panels

    kind = random.choice((*FORMS, *GGML_NUMBERS))
    group = FORMS[kind].elements if kind in FORMS else BLOCK
    stored = FORMS[kind].stored_bytes if kind in FORMS else GGML_NUMBERS[kind] + int(BLOCK * CODE_BYTES[kind])
    blocks = random.choice((1, 2, 3, 5))
    panels = Panels.allocate(kind, rows, blocks * group, group, scale_dtype=torch.float16)
    panels.put_blocks(0, _bytes(random, rows * blocks * stored).view(rows, -1))
    return panels


def _of_words(random: Random, rows: int) -> Any:
    import torch

    from windlass.runtime.kernels.packing.panel_data import CODE_BYTES, KINDS
    from windlass.runtime.kernels.packing.panels import Panels

    kind, group = random.choice(KINDS), random.choice((32, 64, 128))
    groups = random.choice((1, 2, 3))
    dtype = torch.float32 if kind == "fp8" else random.choice((torch.bfloat16, torch.float16, torch.float32))
    panels = Panels.allocate(kind, rows, groups * group, group, scale_dtype=dtype)
    codes = _bytes(random, rows * int(groups * group * CODE_BYTES[kind])).view(rows, -1)
    codes = codes.view(torch.float8_e4m3fn if kind == "fp8" else torch.int32)
    scale = _floats(random, rows * groups, dtype).view(rows, groups)
    offset = None
    if kind == "int4_zeros":
        offset = _bytes(random, rows * groups).view(torch.int8).view(rows, groups)
    elif kind == "int4_minima":
        offset = _floats(random, rows * groups, dtype).view(rows, groups)
    panels.put(0, codes, scale, offset)
    return panels


def _quantize(random: Random, rows: int) -> None:
    import torch

    from windlass.runtime.kernels.packing import quantize

    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    weight = _floats(random, rows * 128, dtype).view(rows, 128)
    kind = random.randrange(3)
    if kind == 0:
        quantize.int4(weight, random.choice((32, 64, 128)), zero_points=random.random() < 0.5)
    elif kind == 1:
        quantize.int8(weight, random.choice((None, 32, 128)))
    else:
        quantize.fp8(weight)


def inside(seed: int, first: int, stop: int, seconds: float = math.inf) -> int:
    use_sanitized()
    missing = [f"{name}: {build.why_not(name)}" for name in LIBRARIES if build.library(name) is None]
    if missing:
        print(*missing, sep="\n")
        return 3
    began, number = time.monotonic(), first
    while number < stop and time.monotonic() < began + seconds:
        if number % 100 == 0 or stop - first == 1:
            print("number", number, flush=True)
        one(number, seed)
        number += 1
    print("done", number - first, flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="only this input")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many, whatever is left")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    first, stop = (given.first, given.first + given.inputs) if given.number is None else (given.number, given.number + 1)
    if given.inside:
        return inside(given.seed, first, stop, given.seconds)
    if not runtimes():
        print("there is no compiler with sanitizers")
        return 3
    compile_sanitized()
    done = run_inside(
        ["--seed", str(given.seed), "--first", str(first), "--inputs", str(stop - first), "--seconds", str(given.seconds)]
    )
    print(*done.stdout.splitlines()[-1:], done.stderr[:6000], sep="\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
