"""A run that takes seconds on a CPU: the tiny recipe as it is shipped, on the documentation as text."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "tiny-glm-moe-cpu.toml"
END = "<|endoftext|>"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "windlass"]


def make(folder: Path) -> Path:
    """A recipe with its data beside it, where it looks for them."""
    from windlass.train.data.prepare import prepare
    from windlass.train.data.unit import Settings
    from windlass.train.data.vocabulary import train_vocabulary, write_tokenizer

    texts = sorted((ROOT / "docs").glob("*.md"))
    data = folder / "out" / "tiny-cpu"
    data.mkdir(parents=True)
    vocabulary = train_vocabulary((path.read_text(encoding="utf-8") for path in texts), 512, (END,), END)
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    write_tokenizer(data / "tokenizer", vocabulary, template, END, (END,), 128)
    settings = Settings(tokenizer=str(data / "tokenizer"), validation=0.2)
    prepare([str(path) for path in texts], data / "tasks", settings, jobs=1)
    recipe = folder / "recipes" / RECIPE.name
    recipe.parent.mkdir()
    shutil.copyfile(RECIPE, recipe)
    return recipe
