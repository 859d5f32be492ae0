"""Vocabularies to test with, beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """llama.cpp's test vocabularies with texts and their tokens (WINDLASS_DATA names another place)."""
    beside = Path(__file__).parents[4] / "shared" / "data"
    found = Path(os.environ.get("WINDLASS_DATA", beside)) / "vocab"
    if not found.is_dir():
        pytest.skip(f"no vocabularies at {found}; set WINDLASS_DATA")
    return found
