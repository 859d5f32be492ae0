"""Drafting models for tests: they know what the fake decoder will say, and get it wrong as often as they are told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from windlass.runtime.engine.schedule.scheduler import Chunk
from windlass.runtime.engine.schedule.sequence import Sequence as EngineSequence

Continue = Callable[[Sequence[int], int], list[int]]


class Oracle:
    """`next_tokens(history, count)`: what will follow; each is replaced by another with the chance `wrong`."""

    def __init__(self, next_tokens: Continue, wrong: float, vocab_size: int, seed: int = 0) -> None:
        self._next, self._wrong, self._vocab_size, self._chance = next_tokens, wrong, vocab_size, random.Random(seed)
        self.num_asked = 0

    def follow(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> None:
        for chunk in chunks:
            assert chunk.sequence.num_computed <= len(chunk.sequence.tokens)

    def draft(self, wanted: Sequence[tuple[EngineSequence, int]]) -> list[tuple[int, ...]]:
        self.num_asked += len(wanted)
        return [tuple(self._spoiled(self._next(sequence.tokens, count))) for sequence, count in wanted]

    def _spoiled(self, tokens: list[int]) -> list[int]:
        return [self._chance.randrange(self._vocab_size) if self._chance.random() < self._wrong else token for token in tokens]

    def followed(self, sequence: EngineSequence) -> None:
        pass

    def can_follow(self, chunk: Chunk) -> bool:
        return True

    def forget(self, number: int) -> None:
        pass


class Follower(Oracle):
    """Drafts only for sequences whose steps it has all followed, as an MTP layer."""

    def __init__(self, next_tokens: Continue, wrong: float, vocab_size: int) -> None:
        super().__init__(next_tokens, wrong, vocab_size)
        self._done: dict[int, int] = {}
        self.num_followed = 0

    def can_follow(self, chunk: Chunk) -> bool:
        return chunk.start <= self._done.get(chunk.sequence.id, 0)

    def follow(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> None:
        assert all(self.can_follow(chunk) for chunk in chunks)
        self.num_followed += len(chunks)
        self._done.update({chunk.sequence.id: chunk.sequence.num_computed for chunk in chunks})

    def followed(self, sequence: EngineSequence) -> None:
        self._done[sequence.id] = sequence.num_computed
