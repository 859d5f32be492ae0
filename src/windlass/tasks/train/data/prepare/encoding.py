"""Tokenizes documents: texts with EOS, chats by the chat template with a mask of assistant tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.errors import BadInput
from windlass.model.text.chat.assistant_spans import Span, render_with_spans
from windlass.runtime.weights.text.files import model_text
from windlass.tasks.train.data.prepare.documents import Document
from windlass.tasks.train.data.tokenizer import tokenizer_fingerprint

Tokens = NDArray[np.uint32]


class Encoded(NamedTuple):
    tokens: Tokens
    learned: list[Span] | None
    """Ranges of tokens to train on; None: all."""


class Encoder:
    def __init__(self, tokenizer: Path, template: str | None) -> None:
        """`template`: used instead of the tokenizer's."""
        found = model_text(tokenizer)
        self.path, self.tokenizer = tokenizer, found.tokenizer
        self.fingerprint = tokenizer_fingerprint(tokenizer, found.tokenizer)
        self._chats = found.tokenizer.backend
        self._texts = type(self._chats).from_str(self._chats.to_str())
        self._texts.encode_special_tokens = True  # special tokens in plain text are encoded as text
        self._template = template or found.chat_template
        self._special = found.special_tokens
        self.end = self._end_token(tokenizer)

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one: ids may have gaps."""
        return max(self.tokenizer.known_ids) + 1

    def _end_token(self, path: Path) -> int:
        text = self._special.get("eos_token")
        number = self.tokenizer.token_id(text) if text is not None else None
        if number is None:
            raise BadInput(f"{path}: tokenizer_config.json has no eos_token, which separates documents; add it there")
        return number

    def texts(self, texts: Sequence[str]) -> list[Encoded]:
        return [Encoded(self._ended(each.ids), None) for each in self._texts.encode_batch_fast(list(texts))]

    def _ended(self, ids: list[int]) -> Tokens:
        return np.array(ids if ids and ids[-1] == self.end else [*ids, self.end], np.uint32)

    def chat_text(self, document: Document) -> tuple[str, list[Span]]:
        """The rendered chat, and the spans of assistant text."""
        if self._template is None:
            raise BadInput(
                "the sources contain chats (`messages`), but the tokenizer has no chat template; set one with --template"
            )
        return render_with_spans(self._template, document.messages or [], tools=document.tools, special_tokens=self._special)

    def chats(self, rendered: Sequence[tuple[str, list[Span]]]) -> list[Encoded]:
        encoded = self._chats.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        return [
            Encoded(np.array(each.ids, np.uint32), _runs(each.offsets, spans))
            for each, (_, spans) in zip(encoded, rendered, strict=True)
        ]


def _runs(offsets: list[Span], spans: list[Span]) -> list[Span]:
    """Tokens that begin within a span. One that begins before it belongs to the prompt."""
    if not offsets or not spans:
        return []
    begins = np.array(offsets)[:, 0]
    edges = np.searchsorted(begins, np.array(spans), side="left")
    return [(int(first), int(last)) for first, last in edges if last > first]
