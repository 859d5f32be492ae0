"""What `windlass convert` says before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.cli.convert.advice import offer, warnings
from windlass.cli.convert.run import format_of
from windlass.units import GB

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("stored_as", "source", "output", "quant", "words"),
    [
        ("", 100, 25, "int4", []),
        ("", 100, 50, "int8", []),
        ("Q4_K", 25, 27, "int4", ["larger than the source", "a second time"]),
        ("Q4_0", 25, 25, "int4", []),  # its codes are copied
        ("Q4_1", 25, 24, "int4", ["a second time"]),
        ("Q6_K", 40, 25, "int4", ["a second time"]),
        ("Q8_0", 50, 100, "bf16", ["larger than the source"]),
        ("int8", 50, 25, "int4", []),
    ],
)
def test_warnings(stored_as: str, source: int, output: int, quant: str, words: list[str]) -> None:
    said = warnings(stored_as, source * GB, output * GB, quant)
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))


@pytest.mark.parametrize(
    ("stored_as", "quant", "calibrated", "offered"),
    [("", "int4", False, True), ("", "int4", True, False), ("", "int8", False, False), ("Q4_0", "int4", False, False)],
)
def test_calibration_is_offered_where_it_would_help(stored_as: str, quant: str, calibrated: bool, offered: bool) -> None:
    assert bool(offer(stored_as, quant, calibrated)) == offered


@pytest.mark.parametrize(
    ("out", "wanted"),
    [("x.gguf", "gguf"), ("X.GGUF", "gguf"), ("a/x.m", "dllama"), ("Qwen2.5-7B", "hf"), ("x", "hf"), (None, "hf")],
)
def test_the_output_name_says_the_format(out: str | None, wanted: str) -> None:
    assert format_of(Path(out) if out else None) == wanted
