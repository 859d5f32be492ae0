"""What `windlass convert` says before it begins."""

from __future__ import annotations

import pytest

from windlass.cli.convert.advice import advice
from windlass.units import GB

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("stored_as", "source", "output", "quant", "calibrated", "words"),
    [
        ("", 100, 25, "int4", True, []),
        ("", 100, 25, "int4", False, ["--calibrate self"]),
        ("", 100, 50, "int8", False, []),
        ("Q4_K", 25, 27, "int4", False, ["larger than the source", "a second time", "--calibrate self"]),
        ("Q4_0", 25, 25, "int4", False, []),  # its codes are copied
        ("Q4_1", 25, 24, "int4", True, ["a second time"]),
        ("Q6_K", 40, 25, "int4", True, ["a second time"]),
        ("Q8_0", 50, 100, "bf16", False, ["larger than the source"]),
        ("int8", 50, 25, "int4", True, []),
    ],
)
def test_advice(stored_as: str, source: int, output: int, quant: str, calibrated: bool, words: list[str]) -> None:
    said = advice(stored_as, source * GB, output * GB, quant, calibrated)
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))
