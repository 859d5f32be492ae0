"""A vocabulary of bytes, and some special tokens, with what is compiled for it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import tokenizers

from windlass.model.text.grammar.tool_grammar import OutputSpec, answer_grammar
from windlass.model.text.parse.stream import special_marks
from windlass.model.text.tokenize.gguf_tokenizer import tokenizer_files
from windlass.model.text.tokenize.tokenizer import Tokenizer
from windlass.runtime.engine.protocol import TokenizerData
from windlass.runtime.engine.sample.grammar import GrammarCompiler, GrammarMatcher, num_words

END = "<|stop|>"


def tokenizer_of(*special: str) -> Tokenizer:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*letters, END, *special],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * (1 + len(special)),
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(msgspec.json.encode(tokenizer_files(metadata)["tokenizer.json"]).decode()), {})


class Vocab:
    """A vocabulary and what is compiled for it."""

    def __init__(self, *special: str) -> None:
        self.tokenizer = tokenizer_of(*special)
        self.end = self.tokenizer.token_id(END) or 0
        self.guides = GrammarCompiler()
        self.guides.set_tokenizer(TokenizerData(self.tokenizer.backend.to_str(), [self.end]))

    def guide(self, asked: OutputSpec, stops: tuple[int, ...] | None = None) -> GrammarMatcher:
        grammar = answer_grammar(asked, special_marks(self.tokenizer, asked.style))
        return self.guides.matcher(grammar, (self.end,) if stops is None else stops)

    def accepts(self, asked: OutputSpec, text: str) -> bool:
        guide, stopped = self.guide(asked), num_words(self.tokenizer.vocab_size)
        for token in self.tokenizer.encode(text, special=False):
            row = np.zeros(stopped, np.uint32)
            guide.fill(row)
            if token not in allowed(row):
                return False
            guide.advance(token)
        row = np.zeros(stopped, np.uint32)
        guide.fill(row)
        return guide.is_complete or self.end in allowed(row)


def allowed(row: np.ndarray[Any, np.dtype[np.uint32]]) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


TEXTUAL = Vocab()
