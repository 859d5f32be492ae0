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

from answering import AnsweringServer, write_task  # noqa: E402

from waiting import hear_interrupts  # noqa: E402

hear_interrupts()


@pytest.fixture
def server() -> Generator[AnsweringServer]:
    with AnsweringServer() as found:
        yield found


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path, 30)
