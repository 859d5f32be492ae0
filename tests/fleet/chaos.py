"""What can happen to a cluster while it is asked, and what must hold nevertheless.

Every event happens in the middle of answers. Between events the cluster is whole again, or as whole as it will be: a test can tell what
each event alone did. The times of what was noticed come from the root's own words.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from asking import Answer, Clients, Question
from cluster import Cluster

NOTICED_WITHIN = 5.0
"""Seconds from a death, or a silence, to the root's word about it."""
SECONDS_TO_GO_ON = 60.0
"""For an epoch to end, and another to be ready, on a machine that is busy with other tests."""
SECONDS_OF_A_PAUSE = 1.0
"""An epoch takes longer to begin, and a step never takes so long."""
OVER, READY = r"epoch \d+ is over", r"epoch \d+ is ready"
"""The root's words."""

PROMPTS = (
    "What is the capital of France?", "Explain gravity to a child.", "Write a haiku about the sea.", "def fibonacci(n):",
    "The quick brown fox", "List three uses of copper.", "Why is the sky blue?", "Name the planets.",
)  # fmt: skip


def questions(max_tokens: int, count: int = 8) -> list[Question]:
    """Every other one is drawn, with a seed of its own."""
    return [Question(prompt, max_tokens, 0.8 * (number % 2), 100 + number) for number, prompt in enumerate(PROMPTS[:count])]


@dataclass
class Chaos:
    """Drives a cluster that is being asked."""

    cluster: Cluster
    clients: Clients
    noticed: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds, by event."""

    def kill(self, number: int) -> None:
        """The host's power goes."""
        self._lose(number, "killed", lambda: self.cluster.hosts.kill(number))

    def power_on(self, number: int) -> None:
        self.cluster.hosts.revive(number)
        self._join(number, lambda: self.cluster.start_worker(number, wait=False))

    def cut(self, number: int) -> None:
        self._lose(number, "cut", lambda: self.cluster.hosts.cut(number))

    def mend(self, number: int) -> None:
        self._join(number, lambda: self.cluster.hosts.restore(number))

    def slow(self, number: int, seconds: float, rate: str = "50mbit") -> None:
        """A link of a twentieth, and processes that stand still two thirds of the time. It is not lost for that."""
        began = time.monotonic()
        self.cluster.hosts.shape(number, rate)
        self.cluster.hosts.halt(number, 0.1, 0.2)
        time.sleep(seconds)
        self.cluster.hosts.unhalt(number)
        self.cluster.hosts.shape(number, self.cluster.hosts.rate)
        self.noticed["slowed"] = time.monotonic() - began
        self._answers_flow()

    def restart_worker(self, number: int) -> None:
        """As somebody who updates a machine does."""
        self._lose(number, "ended", lambda: self.cluster.end_worker(number))
        self._join(number, lambda: self.cluster.start_worker(number, wait=False))

    def kill_rank(self, number: int) -> None:
        """One process, as the system does when memory runs out. Its worker is there and says so."""
        pid = next(iter(self.cluster.computing(number)))
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.noticed["rank killed"] = self._root_says(OVER, began) - began
        self._root_says(READY, began)
        self._answers_flow()

    def freeze_rank(self, number: int) -> None:
        """It neither works nor ends, as one that waits for a disk that is broken; then it goes on, and is not wanted any more."""
        pid = next(iter(self.cluster.computing(number)))
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        over = self._root_says(OVER, began)
        self.noticed["rank stood still"] = over - began
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._root_says(READY, over)
        self._answers_flow()

    def _lose(self, number: int, what: str, happen: Callable[[], object]) -> None:
        """The epoch is over, and the next one is without it."""
        began = time.monotonic()
        happen()
        over = self._root_says(OVER, began)
        self.noticed[what] = over - began
        self._root_says(rf"{READY}(?!.*{re.escape(self.cluster.address(number))})", over)
        self._answers_flow()

    def _join(self, number: int, happen: Callable[[], object]) -> None:
        began = time.monotonic()
        happen()
        self._root_says(rf"{READY}.*{re.escape(self.cluster.address(number))}", began)
        self._answers_flow()

    def _root_says(self, pattern: str, since: float) -> float:
        assert self.cluster.root is not None
        return self.cluster.root.until(pattern, SECONDS_TO_GO_ON, since).at

    def _answers_flow(self) -> None:
        """A few pieces more have come to somebody."""
        before, end = self.clients.num_pieces, time.monotonic() + SECONDS_TO_GO_ON
        while self.clients.num_pieces < before + 16:
            assert time.monotonic() < end, f"no answers go on:\n{self.cluster.said}"
            time.sleep(0.05)


def check(answers: Sequence[Sequence[Answer]], undisturbed: Sequence[Answer]) -> int:
    """No request lost, every text that of an undisturbed run. How many of them were held up in the middle: went on in another epoch."""
    for number, (given, expected) in enumerate(zip(answers, undisturbed, strict=True)):
        assert given, f"client {number} was not answered once"
        for answer in given:
            assert not answer.error, f"client {number}: {answer.error}"
            assert answer.finish == expected.finish == "length"
            assert answer.tokens == expected.tokens, f"client {number}: {first_difference(answer, expected)}"
            assert answer.text == expected.text
    held_up = [answer for given in answers for answer in given if answer.longest_gap > SECONDS_OF_A_PAUSE]
    assert held_up, "nothing happened in the middle of an answer"
    return len(held_up)


def first_difference(answer: Answer, expected: Answer) -> str:
    at = next((n for n, (a, b) in enumerate(zip(answer.tokens, expected.tokens, strict=False)) if a != b), -1)
    return f"token {at} of {len(expected.tokens)} is {answer.tokens[at : at + 1]}, not {expected.tokens[at : at + 1]}"


def check_end(cluster: Cluster, how: signal.Signals) -> float:
    """The root goes, and with it every rank of every host; workers stay. How long that took."""
    began = time.monotonic()
    status = cluster.end_root(how)
    assert status == (-how if how is signal.SIGKILL else 0), cluster.said
    cluster.wait_quiet(10)
    assert "Traceback" not in cluster.said, cluster.said
    for number, worker in cluster.workers.items():
        assert worker.process.poll() is None, f"worker {number} is gone:\n{cluster.said}"
    return time.monotonic() - began
