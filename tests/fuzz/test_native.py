"""The C++ kernels on bytes that no sound file has: a few as they are, and a minute of others under sanitizers with `make long`."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch

from fuzz import native
from windlass.runtime.kernels import build

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(build._compiler() is None, reason="no C++ compiler")]

SECONDS = float(os.environ.get("WINDLASS_FUZZ_SECONDS", 60))


def test_bytes_of_any_kind_are_packed_multiplied_and_quantized() -> None:
    for number in range(40):
        native.one(number, 0)


def test_the_same_number_is_the_same_input() -> None:
    first, second = (native._of_blocks(native.Random("x"), 17) for _ in range(2))
    assert first.kind == second.kind and torch.equal(first.data, second.data)


@pytest.mark.long
def test_a_minute_of_bytes_under_sanitizers() -> None:
    if not native.runtimes():
        pytest.skip("the compiler has no sanitizers")
    saved = dict(build.LIBRARIES)
    try:
        native.compile_sanitized()
    finally:
        build.LIBRARIES.update(saved)
    done = native.run_inside(["--inputs", "1000000", "--seconds", str(SECONDS), "--seed", str(int(time.time()))])
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[:6000]
    assert int(re.findall(r"done (\d+)", done.stdout)[-1]) > 0
