"""The server in this process, and the stand-in for its engine, are those of tests/tasks/serve."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = next(folder for folder in Path(__file__).parents if folder.name == "tests")
for folder in (str(TESTS), str(TESTS / "tasks" / "serve")):
    if folder not in sys.path:
        sys.path.insert(0, folder)
