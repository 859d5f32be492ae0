"""Modules beside the tests, and those of tests/ itself, can be imported."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (str(Path(__file__).parent), str(Path(__file__).parents[3])):
    if folder not in sys.path:
        sys.path.insert(0, folder)
