"""Grammars that an answer must follow: which tokens may come next. Knows no logits and no model; llguidance does the work.

A grammar is compiled here, in the engine's process, for the vocabulary that the client sent once. llguidance is imported with the first
grammar, so whoever never asks for one never pays for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windlass.core.client import Busy
from windlass.engine.protocol import TokenizerData
from windlass.errors import BadInput, MissingExtra

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TokenBitmask = NDArray[np.uint32]
"""A bit for every token, the lowest first: set where the token may come."""
MAX_COMPILED = 32
"""Grammars kept ready: the same schema is asked for again and again."""
MAX_LEXER_STATES = 50_000
"""Of 1-2 kB each (llguidance, LLParserLimits): a grammar out of control ends with its request and not with the memory."""
MAX_GRAMMAR_SIZE = 30_000
"""Symbols, which take up to half a second; the time grows with their square."""
MAX_QUEUED = 1000
MAX_QUEUED_CHARACTERS = 500_000
"""Of grammars that wait to be compiled, together: about a second of work."""


class GrammarMatcher:
    """One answer's place in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: NDArray[np.int64], stops: Iterable[int]) -> None:
        """`ends`: what llguidance takes for the end of a text; `stops`: what ends this answer."""
        self._matcher, self.num_words = matcher, num_words(vocab_size)
        self._ends, self._stops = ends, np.array(sorted(set(stops)), np.int64)
        self.error = ""
        """Why nothing can come next."""

    def fill(self, row: TokenBitmask) -> None:
        """What may come next. A stop only where the grammar is satisfied, also where it is a text's token like any other."""
        part = row[: self.num_words]
        row[self.num_words :] = 0
        self._matcher.unsafe_compute_mask_ptr(part.ctypes.data, part.nbytes)
        _set(row, self._ends, False)
        _set(row, self._stops, self._matcher.is_accepting())
        if self._matcher.is_error():
            self.error = f"the grammar could not be followed any further: {_reason(self._matcher)}"
        elif not row.any():
            self.error = "the grammar could not be followed any further: no token of this model continues it"
        if self.error:
            row[:] = 0

    def advance(self, token: int) -> None:
        """It came; it is no stop."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar at its beginning, from which every answer takes a copy."""

    initial: LLMatcher
    vocab_size: int
    ends: NDArray[np.int64]

    def matcher(self, stops: Iterable[int]) -> GrammarMatcher:
        return GrammarMatcher(self.initial.deep_copy(), self.vocab_size, self.ends, stops)


class GrammarCompiler:
    """Grammars compiled for one vocabulary, by a thread beside the engine's: a large one must not hold up everybody's answers."""

    def __init__(self) -> None:
        self._vocabulary: TokenizerData | None = None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._num_waiting: dict[str, int] = {}
        """Grammar that is not compiled yet -> how many want it."""
        self._thread: ThreadPoolExecutor | None = None

    def set_tokenizer(self, vocabulary: TokenizerData) -> None:
        self._vocabulary, self._tokenizer = vocabulary, None
        self._compiled.clear()
        self._num_waiting.clear()

    def compile(self, grammar: str) -> Future[CompiledGrammar]:
        """Its exception is the BadInput of a grammar that cannot be. Whoever does not wait for it to the end says `release`."""
        found = self._compiled.get(grammar)
        if found is None or (found.done() and found.exception() is not None):
            found = self._submit(grammar)
        if not found.done():
            self._num_waiting[grammar] = self._num_waiting.get(grammar, 0) + 1
        self._compiled.move_to_end(grammar)
        return found

    def release(self, grammar: str) -> None:
        """One fewer waits for it; what nobody waits for is not begun."""
        left = self._num_waiting.get(grammar, 0) - 1
        if left > 0:
            self._num_waiting[grammar] = left
            return
        self._num_waiting.pop(grammar, None)
        if grammar in self._compiled and self._compiled[grammar].cancel():
            del self._compiled[grammar]

    def _submit(self, grammar: str) -> Future[CompiledGrammar]:
        self._num_waiting = {other: count for other, count in self._num_waiting.items() if not self._is_done(other)}
        queued = sum(map(len, self._num_waiting))
        if len(self._num_waiting) >= MAX_QUEUED or (queued and queued + len(grammar) > MAX_QUEUED_CHARACTERS):
            raise Busy("too many grammars are being compiled; ask again in a moment")
        self._thread = self._thread or ThreadPoolExecutor(1, "windlass-grammars")
        self._compiled[grammar] = future = self._thread.submit(self._compile, grammar)
        old = [kept for kept in self._compiled if self._is_done(kept)]
        for kept in old[: max(len(self._compiled) - MAX_COMPILED, 0)]:
            del self._compiled[kept]
        return future

    def _is_done(self, grammar: str) -> bool:
        found = self._compiled.get(grammar)
        return found is None or found.done()

    def matcher(self, grammar: str, stops: Iterable[int]) -> GrammarMatcher:
        """Waits for it."""
        return self.compile(grammar).result().matcher(stops)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> CompiledGrammar:
        tokenizer = self._known_tokenizer()
        found = CompiledGrammar(_matcher(tokenizer, grammar), tokenizer.vocab_size, np.array(tokenizer.eos_tokens, np.int64))
        beginning = found.matcher(())  # what fails at once should fail before anything is computed
        beginning.fill(np.zeros(num_words(tokenizer.vocab_size), np.uint32))
        if beginning.error and not found.initial.is_accepting():
            raise _bad(f"the constraint cannot be compiled: {beginning.error.partition(': ')[2]}")
        return found

    def _known_tokenizer(self) -> LLTokenizer:
        """Made with the first grammar: it takes some 4 microseconds a token of the vocabulary."""
        if self._tokenizer is None:
            if self._vocabulary is None:
                raise _bad("constrained output needs the model's tokenizer, which this engine was not given")
            self._tokenizer = _tokenizer(self._vocabulary)
        return self._tokenizer


def num_words(num_tokens: int) -> int:
    return -(-num_tokens // 32)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtra("llguidance", "serve", "constrained output") from None
    return llguidance


def _tokenizer(vocabulary: TokenizerData) -> LLTokenizer:
    library = _library()
    try:
        return library.LLTokenizer(vocabulary.tokenizer_json, eos_token=list(vocabulary.stop_token_ids) or None)
    except ValueError as error:
        raise _bad(f"answers of this model cannot be constrained; llguidance cannot use its tokenizer: {_short(error)}") from None


def _matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    library = _library()
    limits = library.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False)
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise _bad(f"the constraint cannot be compiled: {_reason(matcher)}")
    return matcher


def _bad(words: str) -> BadInput:
    return BadInput(words, field="constraint")


def _reason(matcher: LLMatcher) -> str:
    return _short(matcher.get_error())


def _short(error: object) -> str:
    """On one line; a regular expression's error has its reason on the last one that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")] or lines[:1] or ["no reason given"]
    return told[0].removeprefix("error:").strip()[:300]


def _set(row: TokenBitmask, tokens: NDArray[np.int64], value: bool) -> None:
    for token in tokens.tolist():
        word, bit = divmod(token, 32)
        if word < len(row):
            row[word] = row[word] | np.uint32(1 << bit) if value else row[word] & np.uint32(~(1 << bit) & 0xFFFFFFFF)
