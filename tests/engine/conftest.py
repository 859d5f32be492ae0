"""Tests here share modules that stand beside them; a worker process imports the same ones by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started by the test find these modules too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH")))))
