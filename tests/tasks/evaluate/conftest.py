"""Tests here share modules that stand beside them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE, TESTS = Path(__file__).parent, next(folder for folder in Path(__file__).parents if folder.name == "tests")
for folder in (str(TESTS), str(HERE), str(HERE / "sandbox")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from waiting import hear_interrupts  # noqa: E402

hear_interrupts()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The published sets: WINDLASS_DATA, or beside the repository."""
    found = Path(os.environ.get("WINDLASS_DATA", TESTS.parents[1] / "shared" / "data"))
    if not found.is_dir():
        pytest.skip(f"no data sets at {found}; set WINDLASS_DATA")
    return found
