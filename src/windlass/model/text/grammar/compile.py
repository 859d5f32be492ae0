"""llguidance: a grammar's text to a matcher, within limits. Every error of the library is one of ours from here on.

Compiling a stranger's grammar may take any time and memory, and may end the process (a stack that is too deep). It belongs in a process of
its own first (model/text/isolated); what has passed there may be compiled elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from windlass.core.client import Broken
from windlass.errors import BadInput, MissingExtra
from windlass.model.text.tokenize.build import library_reason

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_LEXER_STATES = 50_000
"""Of 1-2 kB each (llguidance, LLParserLimits): an exploding grammar fails its request and does not exhaust memory."""
MAX_GRAMMAR_SIZE = 30_000
"""Symbols: up to half a second; the time grows with their square."""


def grammar_tokenizer(tokenizer_json: str, stop_token_ids: Sequence[int]) -> LLTokenizer:
    """About 4 microseconds per token of the vocabulary. BadInput: it is none that llguidance can use. Broken: no fault of any request."""
    library = _library()
    try:
        return library.LLTokenizer(tokenizer_json, eos_token=list(stop_token_ids) or None)
    except TypeError as error:
        raise Broken(
            f"constrained output needs another version of llguidance than is installed: {library_reason(error)}"
        ) from None
    except BaseException as error:  # noqa: BLE001 - Rust's panics are no Exceptions
        raise bad_constraint(
            f"constrained output is not available: llguidance cannot use this model's tokenizer: {library_reason(error)}"
        ) from None


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher that has computed its first mask. BadInput: the grammar is invalid, too large, or matches nothing."""
    library = _library()
    limits = library.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False)
    matcher: LLMatcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise bad_constraint(f"the constraint cannot be compiled: {reason(matcher)}")
    beginning = matcher.deep_copy()
    is_empty = not any(beginning.compute_bitmask())
    if beginning.is_error():
        raise bad_constraint(f"the constraint cannot be compiled: {reason(beginning)}")
    if is_empty and not matcher.is_accepting():
        raise bad_constraint("the constraint cannot be compiled: no token of this model matches")
    return matcher


def bad_constraint(message: str) -> BadInput:
    return BadInput(message, field="constraint")


def reason(matcher: LLMatcher) -> str:
    """On one line; for a regular expression the line that starts with `error:`."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")] or lines[:1] or ["no reason given"]
    return errors[0].removeprefix("error:").strip()[:300]


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtra("llguidance", "serve", "constrained output") from None
    return llguidance
