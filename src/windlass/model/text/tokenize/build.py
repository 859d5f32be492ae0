"""tokenizer.json -> the tokenizer of the library. Every error of the library, Rust panics too, is one of ours from here on.

A panic arrives as a BaseException, which no `except Exception` catches; Rust has then printed its own lines already. What the library
cannot survive (memory that is not there, a stack that is too deep) ends the process: runtime/weights/text/trial.py tries it in one of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.errors import BadInput, MissingExtra
from windlass.foreign import is_failure, shown

if TYPE_CHECKING:
    import tokenizers

TRIED_TEXTS = (
    "",
    "Hello, world! 12345\n\n  def f(x):",
    "naïve café — 你好 🙂\u200d é",
    "<s> </s> [INST] <|im_start|>",
    "a" * 200,
    "\x00\ufffd",
)
TRIED_TOKENS = 64
"""Of the vocabulary, spread over it, that are decoded."""


def build_tokenizer(content: bytes, where: str) -> tokenizers.Tokenizer:
    """`content`: of tokenizer.json. Truncation and padding, which a file may ask for, are off: a prompt is what was sent."""
    try:
        import tokenizers
    except ImportError:
        raise MissingExtra("tokenizers", "run", "turning text into tokens") from None
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
        return backend
    except BaseException as error:  # noqa: BLE001 - the library raises Exception itself for a damaged file, and panics
        raise BadInput(f"{where} is not a tokenizer: {library_reason(error)}") from None


def library_reason(error: BaseException) -> str:
    """The first line of what a Rust library says, cut. Raises what is no error of a library: an interrupt, an exit."""
    if not is_failure(error):
        raise error
    return shown(next(iter(str(error).splitlines()), "") or type(error).__name__)


def check_tokenizer(backend: tokenizers.Tokenizer, where: str = "tokenizer.json") -> None:
    """Encodes a few texts and decodes some of its tokens; BadInput if any of that fails."""
    try:
        for text in TRIED_TEXTS:
            for special in (False, True):
                backend.decode(backend.encode(text, add_special_tokens=special).ids, skip_special_tokens=False)
        backend.encode_batch_fast(list(TRIED_TEXTS))
        known = sorted(backend.get_vocab(with_added_tokens=True).values())
        for token in known[:: max(1, len(known) // TRIED_TOKENS)]:
            backend.decode([token], skip_special_tokens=False)
        backend.decode(known[-TRIED_TOKENS:])
        backend.get_added_tokens_decoder()
    except BaseException as error:  # noqa: BLE001 - as above
        raise BadInput(f"{where} is a tokenizer that fails on simple texts: {library_reason(error)}") from None
