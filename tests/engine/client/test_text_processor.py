from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("tokenizers")

from byte_vocab import TEXTUAL
from fake_text import model_text

from windlass.core.request import TokenLogprob
from windlass.engine.client.text_processor import TextProcessor

pytestmark = pytest.mark.cpu


def test_tokens_that_are_pieces_of_a_character_have_their_bytes() -> None:
    wording = TextProcessor(dataclasses.replace(model_text(), tokenizer=TEXTUAL.tokenizer))
    tokens = TEXTUAL.tokenizer.encode("a€", special=False)
    entries = [TokenLogprob(token_id=token, logprob=-1.0, top=(TokenLogprob(token_id=token, logprob=-1.0),)) for token in tokens]
    for _ in range(2):  # the second time they are known
        found = wording.with_text(entries)
        assert [entry.raw for entry in found] == [b"", b"\xe2", b"\x82", b"\xac"]
        assert [entry.top[0].raw for entry in found] == [entry.raw for entry in found]
        assert found[0].token == "a"
