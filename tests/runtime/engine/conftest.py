"""Tests here share modules that stand beside them; a worker process imports the same ones by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE, TESTS = str(Path(__file__).parent), str(Path(__file__).parents[2])
for folder in (TESTS, HERE):
    if folder not in sys.path:
        sys.path.insert(0, folder)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started by the test find these modules too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (HERE, TESTS, os.environ.get("PYTHONPATH")))))
