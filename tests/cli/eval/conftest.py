"""Tests here share a server that stands beside them."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

HERE, TESTS = Path(__file__).parent, next(folder for folder in Path(__file__).parents if folder.name == "tests")
for folder in (str(TESTS), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from answering import AnsweringServer  # noqa: E402

from waiting import hear_interrupts  # noqa: E402

hear_interrupts()


@pytest.fixture
def server() -> Generator[AnsweringServer]:
    with AnsweringServer() as found:
        yield found


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task of one's own: sums of two numbers, six lines."""
    rows = "\n".join(f'{{"a": {number}, "b": 7, "sum": {number + 7}}}' for number in range(30))
    (tmp_path / "sums.jsonl").write_text(rows)
    lines = [
        'name = "sums"',
        'category = "math"',
        'source.file = "sums.jsonl"',
        'prompt.chat = "{a} + {b} ="',
        'answer = "{sum}"',
        'grader = "number"',
    ]
    (tmp_path / "sums.toml").write_text("\n".join(lines))
    return tmp_path / "sums.toml"
