"""A run that takes seconds on a CPU: the tiny recipe as it is shipped, on sentences drawn from a few words."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "tiny-glm-moe-cpu.toml"
END = "<|endoftext|>"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "windlass"]


WHO = "cat dog horse sailor baker winch crane captain engineer child".split()
DOES = "lifts sees pulls finds drops counts carries paints holds turns".split()
WHAT = "rope anchor barrel chain lantern apple wheel letter stone sail".split()
HOW = "slowly quickly again today at night without a word".split()


def _story(number: int) -> str:
    """Forty sentences, the same for the same number."""
    draw = random.Random(number)
    return " ".join(
        f"The {draw.choice(WHO)} {draw.choice(DOES)} {draw.randint(2, 99)} {draw.choice(WHAT)}s {draw.choice(HOW)}."
        for _ in range(40)
    )


def make(folder: Path) -> Path:
    """A recipe with its data beside it, where it looks for them."""
    from windlass.tasks.train.data.prepare.prepare import prepare
    from windlass.tasks.train.data.prepare.train_tokenizer import train_vocabulary, write_tokenizer
    from windlass.tasks.train.data.prepare.unit import PrepareSettings

    data = folder / "out" / "tiny-cpu"
    data.mkdir(parents=True)
    source = data / "sentences.jsonl"
    texts = [_story(number) for number in range(400)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    vocabulary = train_vocabulary(texts, 512, (END,), END)
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    write_tokenizer(data / "tokenizer", vocabulary, template, END, (END,), 128)
    settings = PrepareSettings(tokenizer=str(data / "tokenizer"), validation=0.1)
    prepare([str(source)], data / "tasks", settings, jobs=1)
    recipe = folder / "recipes" / RECIPE.name
    recipe.parent.mkdir()
    shutil.copyfile(RECIPE, recipe)
    return recipe
