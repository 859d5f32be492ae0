"""Modules beside the tests' own folders are importable."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = next(folder for folder in Path(__file__).parents if folder.name == "tests")
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))
