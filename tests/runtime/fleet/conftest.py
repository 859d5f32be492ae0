"""Tests here share modules that stand beside them."""

from __future__ import annotations

import sys
from pathlib import Path

HERE, TESTS = Path(__file__).parent, next(folder for folder in Path(__file__).parents if folder.name == "tests")
for folder in (str(TESTS), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from waiting import hear_interrupts  # noqa: E402

hear_interrupts()
