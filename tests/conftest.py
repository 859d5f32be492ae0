"""Shared by all tests: how hypothesis runs, and where the fact sheets are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: a first call that imports something is slow, not wrong. In CI the same examples every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def facts() -> Path:
    """Fact sheets beside the repository (WINDLASS_FACTS names another place). What must always be checked is in tests/ itself."""
    beside = Path(__file__).parents[2] / "shared" / "facts"
    found = Path(os.environ.get("WINDLASS_FACTS", beside))
    if not found.is_dir():
        pytest.skip(f"no fact sheets at {found}; set WINDLASS_FACTS")
    return found
