"""Where a run stands: counts that add up, rates, what is left. Pure but for the clock it is given."""

from __future__ import annotations

from typing import Protocol

from windlass.core.model import Frozen
from windlass.tasks.evaluate.run.budget import Price
from windlass.tasks.evaluate.run.records import Record


class Standing(Frozen):
    num_done: int
    num_total: int
    num_correct: int
    num_graded: int
    num_failed: int
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    """Of this process; what a resumed run took before is not in it."""
    num_new: int
    """Answers of this process."""
    usd: float
    task: str = ""

    @property
    def answers_per_second(self) -> float:
        return self.num_new / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        rate = self.answers_per_second
        return (self.num_total - self.num_done) / rate if rate else None

    @property
    def usd_left(self) -> float | None:
        return self.usd / self.num_new * (self.num_total - self.num_done) if self.num_new else None


class Watcher(Protocol):
    def update(self, standing: Standing) -> None: ...

    def note(self, line: str) -> None: ...


class Silent:
    def update(self, standing: Standing) -> None:
        pass

    def note(self, line: str) -> None:
        pass


class Tally:
    """Counts records as they come. A record that comes again (its verdict) replaces what it counted for."""

    def __init__(self, num_total: int, price: Price) -> None:
        self._num_total, self._price = num_total, price
        self._verdicts: dict[str, str] = {}
        self._counts = {"correct": 0, "wrong": 0, "failed": 0, "pending": 0}
        self._num_new = self._prompt = self._answer = 0
        self.longest_seconds = 0.0

    def add(self, record: Record, is_new: bool) -> None:
        before = self._verdicts.get(record.key)
        if before is not None:
            self._counts[before] -= 1
        self._verdicts[record.key] = record.verdict
        self._counts[record.verdict] += 1
        if is_new and before in (None, "failed"):
            self._num_new += 1
            self._prompt += record.tokens.prompt
            self._answer += record.tokens.answer
            self.longest_seconds = max(self.longest_seconds, record.seconds)

    def standing(self, seconds: float, task: str) -> Standing:
        counts = self._counts
        return Standing(
            num_done=sum(counts.values()),
            num_total=self._num_total,
            num_correct=counts["correct"],
            num_graded=counts["correct"] + counts["wrong"],
            num_failed=counts["failed"],
            prompt_tokens=self._prompt,
            answer_tokens=self._answer,
            seconds=seconds,
            num_new=self._num_new,
            usd=self._price.usd(self._prompt, self._answer, seconds),
            task=task,
        )
