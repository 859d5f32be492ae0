"""Tokens and masks of chats are those of transformers' own apply_chat_template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.tasks.train.data.prepare.documents import Document
from windlass.tasks.train.data.prepare.encoding import Encoder

pytestmark = pytest.mark.cpu
CHATS = [
    ["hi", "the quick fox"],
    ["2 + 2 =", "4", "and 3 + 3?", "6", "日本語", "naïve café"],
    ["", "", "x", "y  "],
    ["only a question"],
]


@pytest.mark.parametrize("words", CHATS)
def test_masks_are_transformers_masks(words: list[str], tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))
    template = json.loads((tokenizer / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": ("user", "assistant")[place % 2], "content": word} for place, word in enumerate(words)]
    expected = theirs.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    encoder = Encoder(tokenizer, None)
    (found,) = encoder.chats([encoder.chat_text(Document("here", messages=messages))])
    mask = [0] * len(found.tokens)
    for begin, end in found.learned or []:
        mask[begin:end] = [1] * (end - begin)
    assert found.tokens.tolist() == expected["input_ids"]
    assert mask == expected["assistant_masks"]
    assert any(mask) == (len(words) > 1)
