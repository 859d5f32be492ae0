"""The tokenizer of a model directory: encoding, decoding, and incremental decoding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.core.client import Broken
from windlass.core.constants import DECODE_ERRORS
from windlass.errors import BadInput
from windlass.model.text.tokenize.build import build_tokenizer, library_reason

if TYPE_CHECKING:
    import tokenizers

UNFINISHED = "�"
"""The replacement character, for bytes that are not (yet) a complete character."""
LONG_CHARACTERS = 50_000
"""Texts longer than this, about 20 ms of work, are encoded without the GIL."""


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


@cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes map to themselves, the others to code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        self.backend = backend
        self.config = config
        """tokenizer_config.json; its `chat_template` is for text.chat."""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which are not part of the text."""
        return frozenset(number for number, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    @cached_property
    def known_ids(self) -> frozenset[int]:
        """Token ids, which may have gaps."""
        return frozenset(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def longest_token(self) -> int:
        """In characters of the vocabulary's encoding, which has at least as many as the text."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add special tokens (BOS). False for a rendered chat, which has its own."""
        try:
            if len(text) < LONG_CHARACTERS:
                return self.backend.encode(text, add_special_tokens=special).ids
            # Releases the GIL, so that other threads can run.
            return self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except BaseException as error:  # noqa: BLE001 - a tokenizer.json may be such that the library fails, or panics, on some texts
            raise Broken(f"the model's tokenizer cannot encode this text: {library_reason(error)}") from None

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        try:
            if len(tokens) < LONG_CHARACTERS:
                return self.backend.decode(list(tokens), skip_special_tokens=skip_special)
            return self.backend.decode_batch([list(tokens)], skip_special_tokens=skip_special)[0]  # as above
        except BaseException as error:  # noqa: BLE001 - as above
            raise Broken(f"the model's tokenizer cannot decode these tokens: {library_reason(error)}") from None

    @cached_property
    def _texts(self) -> dict[tuple[int, bool], str]:
        """Of single tokens that were decoded."""
        return {}

    def text_of(self, token: int, *, skip_special: bool = True) -> str:
        """Of one token; as `decode`, but remembered."""
        found = self._texts.get((token, skip_special))
        if found is None:
            found = self._texts[token, skip_special] = self.decode([token], skip_special=skip_special)
        return found

    def raw(self, token: int) -> bytes:
        """The bytes of a token that is part of a character, from the byte alphabet or the form <0xE2>."""
        written = self.backend.id_to_token(token) or ""
        if _BYTE.fullmatch(written):
            return bytes([int(written[3:5], 16)])
        letters = _byte_letters()
        if all(letter in letters for letter in written):
            return bytes(letters[letter] for letter in written)
        return written.encode(errors="replace")

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def incremental(self, prompt: Iterable[int] = (), *, skip_special: bool = True) -> IncrementalDecoder:
        return IncrementalDecoder(self, prompt, skip_special)


class IncrementalDecoder:
    """Decodes tokens as they arrive; a character is returned when all its bytes are there.

    A token's text depends on the tokens before it (a leading space is dropped, bytes join to characters). So the new text is the
    difference between two decodings of a short window: the last returned tokens, with and without the pending ones.
    """

    _LONGEST = 4
    """Maximum tokens per character: UTF-8 has at most four bytes."""
    _PATIENCE = 8
    """Pending tokens after which they are considered invalid UTF-8 and returned as they are."""

    def __init__(self, tokenizer: Tokenizer, prompt: Iterable[int] = (), skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._window: list[int] = list(prompt)[-self._PATIENCE :]
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if self._skip_special and token in self._tokenizer.special_ids:
            return ""
        self._pending.append(token)
        text = self._new_text(self._pending)
        if not text.endswith(UNFINISHED):
            return self._return(len(self._pending), text)
        if len(self._pending) < self._PATIENCE:
            return ""
        count = len(self._pending) - self._LONGEST + 1  # an incomplete character can only be in the last three
        return self._return(count, self._new_text(self._pending[:count]))

    def finish(self) -> str:
        """The remaining text after the last token."""
        return self._return(len(self._pending), self._new_text(self._pending))

    def _new_text(self, tokens: list[int]) -> str:
        window = self._window
        if not tokens:
            return ""
        if not window:
            before = ""
        elif len(window) == 1:  # as it is after every token with text
            before = self._tokenizer.text_of(window[0], skip_special=self._skip_special)
        else:
            before = self._decode(window)
        return self._decode(window + tokens)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=self._skip_special)

    def _return(self, count: int, text: str) -> str:
        # A token without text (a leading space) still affects the next one: the window grows until there is text.
        self._window = self._pending[:count] if text else self._window + self._pending[:count]
        self._pending = self._pending[count:]
        return text


def load_tokenizer(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise BadInput(f"{directory} has no tokenizer.json; copy it from the original model")
    return Tokenizer(build_tokenizer(file.read_bytes(), str(file)), _config(directory / "tokenizer_config.json"))


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except DECODE_ERRORS as error:
        raise BadInput(f"{file} is not valid JSON: {error}") from None
