"""`python make_recipe.py FOLDER`: the tiny recipe with its data, there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tasks" / "train"))

import tiny_run

if __name__ == "__main__":
    tiny_run.make(Path(sys.argv[1]))
