"""Constrained output: which tokens a grammar allows next. Knows no logits and no model; llguidance does the work.

Grammars are compiled in the engine process, for the tokenizer that the client sent once; they have passed a worker's limits before
(model/text/isolated). llguidance is imported with the first grammar.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from windlass.core.client import Busy
from windlass.model.text.grammar.compile import bad_constraint, compile_grammar, grammar_tokenizer, reason
from windlass.model.text.isolated.limits import yield_to_others
from windlass.runtime.engine.protocol import TokenizerData
from windlass.runtime.machine.memory import process_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TokenBitmask = NDArray[np.uint32]
"""One bit per token, lowest first: set if the token is allowed."""
MAX_COMPILED = 32
MAX_COMPILED_BYTES = 128 * 2**20
"""Compiled grammars kept: the same schema is used again and again. Those of 300 published schemas take 1 to 10 MiB."""
MASK_SECONDS = 0.1
MASK_SECONDS_PER_TOKEN = 0.002
"""CPU time of an answer's masks, which hold up the whole batch. They take 0.02 ms a token; 18 ms where a grammar is as ambiguous as `x: x x`."""
MAX_QUEUED = 1000
MAX_QUEUED_CHARACTERS = 500_000
"""Of all grammars that wait to be compiled: about a second of work."""
STACK_BYTES = 32 * 2**20
"""Of the thread that compiles: more than a worker has, which has compiled the same."""


class GrammarMatcher:
    """The state of one output in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: NDArray[np.int64], stops: Iterable[int]) -> None:
        """`ends`: llguidance's end-of-text tokens; `stops`: the stop tokens of this request."""
        self._matcher, self.num_words = matcher, num_words(vocab_size)
        self._ends, self._stops = ends, np.array(sorted(set(stops)), np.int64)
        self._seconds_left, self._is_slow = MASK_SECONDS, False
        self.error = ""
        """Why no token is allowed."""

    def fill(self, row: TokenBitmask) -> None:
        """Sets the bits of allowed tokens. Stop tokens are allowed only where the grammar is complete, even if they are ordinary text tokens."""
        part = row[: self.num_words]
        row[self.num_words :] = 0
        # The clock of CPU time costs several microseconds: it is read for those that were once slow by the other.
        clock = time.thread_time if self._is_slow else time.perf_counter
        began = clock()
        self._matcher.unsafe_compute_mask_ptr(part.ctypes.data, part.nbytes)
        seconds = clock() - began
        if self._is_slow:
            self._seconds_left += MASK_SECONDS_PER_TOKEN - seconds
        self._is_slow = self._is_slow or seconds > MASK_SECONDS_PER_TOKEN
        _set(row, self._ends, False)
        _set(row, self._stops, self._matcher.is_accepting())
        if self._matcher.is_error():
            self.error = f"the grammar cannot be continued: {reason(self._matcher)}"
        elif not row.any():
            self.error = "the grammar cannot be continued: no token of this model matches"
        elif self._seconds_left < 0:
            self.error = "the grammar needs too long to tell which tokens may follow: it is ambiguous, or too large; simplify it"
        if self.error:
            row[:] = 0

    def advance(self, token: int) -> None:
        """A token was sampled that is not a stop token."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """No token can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class WithoutStops(GrammarMatcher):
    """Masks the stop tokens until there are `min_tokens` of output, with or without a grammar besides."""

    def __init__(self, grammar: GrammarMatcher | None, min_tokens: int, vocab_size: int, stops: Iterable[int]) -> None:
        self._grammar, self._left = grammar, min_tokens
        self.num_words = num_words(vocab_size) if grammar is None else max(grammar.num_words, num_words(vocab_size))
        self._stops = np.array(sorted(set(stops)), np.int64)

    @property
    def error(self) -> str:  # type: ignore[override]
        return "" if self._grammar is None else self._grammar.error

    def fill(self, row: TokenBitmask) -> None:
        if self._grammar is None:
            row[:] = np.uint32(0xFFFFFFFF)
        else:
            self._grammar.fill(row)
        if self._left > 0:
            before = row.copy()
            _set(row, self._stops, False)
            if not row.any():  # a complete grammar allows nothing else
                row[:] = before

    def advance(self, token: int) -> None:
        self._left -= 1
        if self._grammar is not None:
            self._grammar.advance(token)

    @property
    def is_complete(self) -> bool:
        return self._grammar is not None and self._grammar.is_complete


@dataclass(frozen=True)
class CompiledGrammar:
    """A matcher in its initial state, copied for every request."""

    initial: LLMatcher
    vocab_size: int
    ends: NDArray[np.int64]
    size_bytes: int
    """By which the process grew."""

    def matcher(self, stops: Iterable[int]) -> GrammarMatcher:
        return GrammarMatcher(self.initial.deep_copy(), self.vocab_size, self.ends, stops)


class GrammarCompiler:
    """Compiles grammars for one tokenizer in threads of its own: those that take long in one that leaves the CPU to whoever else wants it."""

    def __init__(self) -> None:
        self._vocabulary: TokenizerData | None = None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._num_waiting: dict[str, int] = {}
        """Grammar that is not compiled yet -> how many requests wait for it."""
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        """Whether it is for grammars that take long -> a thread. Python's lock is not held while one is compiled."""

    def set_tokenizer(self, vocabulary: TokenizerData) -> None:
        self._vocabulary, self._tokenizer = vocabulary, None
        self._compiled.clear()
        self._num_waiting.clear()

    def compile(self, grammar: str, is_slow: bool = False) -> Future[CompiledGrammar]:
        """Raises BadInput through the future for an invalid grammar. A caller that stops waiting calls `release`."""
        found = self._compiled.get(grammar)
        if found is None or (found.done() and found.exception() is not None):
            found = self._submit(grammar, is_slow)
        if not found.done():
            self._num_waiting[grammar] = self._num_waiting.get(grammar, 0) + 1
        self._compiled.move_to_end(grammar)
        return found

    def release(self, grammar: str) -> None:
        """One request fewer waits for it; a compilation that nobody waits for is cancelled."""
        left = self._num_waiting.get(grammar, 0) - 1
        if left > 0:
            self._num_waiting[grammar] = left
            return
        self._num_waiting.pop(grammar, None)
        if grammar in self._compiled and self._compiled[grammar].cancel():
            del self._compiled[grammar]

    def _submit(self, grammar: str, is_slow: bool) -> Future[CompiledGrammar]:
        self._num_waiting = {other: count for other, count in self._num_waiting.items() if not self._is_done(other)}
        queued = sum(map(len, self._num_waiting))
        if len(self._num_waiting) >= MAX_QUEUED or (queued and queued + len(grammar) > MAX_QUEUED_CHARACTERS):
            raise Busy("too many grammars are being compiled; retry in a moment")
        if is_slow not in self._threads:
            self._threads[is_slow] = ThreadPoolExecutor(1, "windlass-grammars", yield_to_others if is_slow else None)
        before = threading.stack_size(STACK_BYTES)  # its thread starts with the first grammar
        self._compiled[grammar] = future = self._threads[is_slow].submit(self._compile, grammar)
        threading.stack_size(before)
        self._forget_old()
        return future

    def _forget_old(self) -> None:
        old = [kept for kept in self._compiled if self._is_done(kept)]
        size_bytes = sum(map(self._size_bytes, old))
        for kept in old:
            if len(self._compiled) <= MAX_COMPILED and size_bytes <= MAX_COMPILED_BYTES:
                return
            size_bytes -= self._size_bytes(kept)
            del self._compiled[kept]

    def _size_bytes(self, grammar: str) -> int:
        found = self._compiled[grammar]
        return found.result().size_bytes if found.exception() is None else 0

    def _is_done(self, grammar: str) -> bool:
        found = self._compiled.get(grammar)
        return found is None or found.done()

    def matcher(self, grammar: str, stops: Iterable[int]) -> GrammarMatcher:
        """Blocks until it is compiled."""
        return self.compile(grammar).result().matcher(stops)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> CompiledGrammar:
        tokenizer = self._known_tokenizer()
        before = process_memory().anonymous_bytes
        matcher = compile_grammar(tokenizer, grammar)
        size_bytes = max(process_memory().anonymous_bytes - before, 0)
        return CompiledGrammar(matcher, tokenizer.vocab_size, np.array(tokenizer.eos_tokens, np.int64), size_bytes)

    def _known_tokenizer(self) -> LLTokenizer:
        """Made with the first grammar."""
        if self._tokenizer is None:
            if self._vocabulary is None:
                raise bad_constraint("constrained output needs the model's tokenizer, and this engine was not sent it")
            self._tokenizer = grammar_tokenizer(self._vocabulary.tokenizer_json, self._vocabulary.stop_token_ids)
        return self._tokenizer


def num_words(num_tokens: int) -> int:
    return -(-num_tokens // 32)


def _set(row: TokenBitmask, tokens: NDArray[np.int64], value: bool) -> None:
    for token in tokens.tolist():
        word, bit = divmod(token, 32)
        if word < len(row):
            row[word] = row[word] | np.uint32(1 << bit) if value else row[word] & np.uint32(~(1 << bit) & 0xFFFFFFFF)
