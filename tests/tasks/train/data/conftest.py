"""Tests here share modules that stand beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}<e>{% endgeneration %}"
    "{% else %}<u>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer that has a chat template."""
    from windlass.tasks.train.data.prepare.train_tokenizer import train_vocabulary, write_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["the quick brown fox jumps over the lazy dog", "def f(x):\n    return x + 12", "naïve café, 日本語"] * 5
    write_tokenizer(
        folder, train_vocabulary(texts, 320, ("<e>", "<s>", "<u>", "<a>"), "<e>"), TEMPLATE, "<e>", ("<e>", "<u>"), 64
    )
    return folder
