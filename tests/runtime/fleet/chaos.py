"""What can happen to a cluster while it is asked, and what must hold nevertheless.

Every event happens in the middle of answers. Between events the cluster is whole again, or as whole as it will be: a test can tell what
each event alone did. How something was noticed is in the root's own words: a silence that was listened for, and not a sum that took too
long. That a silence is noticed within five seconds is in test_channel.py and test_session.py, by clocks of their own; how long that takes on
a machine is measured by bench/speed_fleet.py.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from asking import Answer, Clients, Question
from cluster import Cluster
from followed import Line

from waiting import HUNG_SECONDS

OVER, READY = r"epoch \d+ is over", r"epoch \d+ is ready"
"""The root's words."""
SILENT = r"is lost \(no heartbeat for"
PIECES = 16
"""Of answers that go on."""

PROMPTS = (
    "What is the capital of France?", "Explain gravity to a child.", "Write a haiku about the sea.", "def fibonacci(n):",
    "The quick brown fox", "List three uses of copper.", "Why is the sky blue?", "Name the planets.",
)  # fmt: skip


def questions(max_tokens: int, count: int = 8) -> list[Question]:
    """Every other one is drawn, with a seed of its own."""
    return [Question(prompt, max_tokens, 0.8 * (number % 2), 100 + number) for number, prompt in enumerate(PROMPTS[:count])]


class Change(NamedTuple):
    """From one epoch to the next."""

    over: float
    ready: float


@dataclass
class Chaos:
    """Drives a cluster that is being asked."""

    cluster: Cluster
    clients: Clients
    noticed: dict[str, str] = field(default_factory=dict[str, str])
    """By event, the root's words about it."""
    changes: list[Change] = field(default_factory=list["Change"])

    def kill(self, number: int) -> None:
        """The host's power goes."""
        self._lose(number, "killed", lambda: self.cluster.hosts.kill(number))

    def power_on(self, number: int) -> None:
        self._join([number], lambda: self._powered_on(number))

    def cut(self, number: int) -> None:
        self._lose(number, "cut", lambda: self.cluster.hosts.cut(number))

    def mend(self, number: int) -> None:
        self._join([number], lambda: self.cluster.hosts.restore(number))

    def power_on_and_mend(self, dark: int, apart: int) -> None:
        """Both come back at about the same time."""
        self._join([dark, apart], lambda: (self._powered_on(dark), self.cluster.hosts.restore(apart)))

    def _powered_on(self, number: int) -> None:
        self.cluster.hosts.revive(number)
        self.cluster.start_worker(number, wait=False)

    def slow(self, number: int, rate: str = "50mbit") -> None:
        """A link of a twentieth, and processes that stand still two thirds of the time. It is not lost for that: answers go on."""
        self.cluster.hosts.shape(number, rate)
        self.cluster.hosts.halt(number, 0.1, 0.2)
        self.answers_flow()
        self.cluster.hosts.unhalt(number)
        self.cluster.hosts.shape(number, self.cluster.hosts.rate)
        self.answers_flow()

    def restart_worker(self, number: int) -> None:
        """As somebody who updates a machine does."""
        self._lose(number, "ended", lambda: self.cluster.end_worker(number))
        self._join([number], lambda: self.cluster.start_worker(number, wait=False))

    def kill_rank(self, number: int) -> None:
        """One process, as the system does when memory runs out. Its worker is there and says so."""
        pid = next(iter(self.cluster.computing(number)))
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self._change("rank killed", OVER, READY, began)

    def freeze_rank(self, number: int) -> None:
        """It neither works nor ends, as one that waits for a disk that is broken; then it goes on, and is not wanted any more."""
        pid = next(iter(self.cluster.computing(number)))
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        self._root_says(OVER, began)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._change("rank stood still", OVER, READY, began)

    def _lose(self, number: int, what: str, happen: Callable[[], object]) -> None:
        """The epoch is over, and the next one is without it."""
        began, address = time.monotonic(), re.escape(self.cluster.address(number))
        happen()
        self._change(what, rf"{OVER}: {address}", rf"{READY}(?!.*{address})", began)

    def _join(self, numbers: Sequence[int], happen: Callable[[], object]) -> None:
        """The epoch there is, which is without them, ends for them."""
        began, all_of_them = time.monotonic(), "".join(rf"(?=.*{re.escape(self.cluster.address(number))})" for number in numbers)
        happen()
        self._change(f"joined by {numbers}", OVER, rf"{READY}{all_of_them}", began)

    def _change(self, what: str, over: str, ready: str, since: float) -> None:
        ended = self._root_says(over, since)
        self.noticed[what] = ended.text
        self.changes.append(Change(ended.at, self._root_says(ready, ended.at).at))
        self.answers_flow()

    def _root_says(self, pattern: str, since: float) -> Line:
        assert self.cluster.root is not None
        return self.cluster.root.until(pattern, since)

    def answers_flow(self) -> None:
        """A few pieces more have come to somebody."""
        before, end = self.clients.num_pieces, time.monotonic() + HUNG_SECONDS
        while self.clients.num_pieces < before + PIECES:
            assert time.monotonic() < end, f"hung: no answers go on:\n{self.cluster.said}"
            time.sleep(0.05)


def check(answers: Sequence[Sequence[Answer]], undisturbed: Sequence[Answer], changes: Sequence[Change]) -> int:
    """No request lost, every text that of an undisturbed run. How often one was held up in the middle: begun in one epoch, it went on in another."""
    for number, (given, expected) in enumerate(zip(answers, undisturbed, strict=True)):
        assert given, f"client {number} was not answered once"
        for answer in given:
            assert not answer.error, f"client {number}: {answer.error}"
            assert answer.finish == expected.finish == "length"
            assert answer.tokens == expected.tokens, f"client {number}: {first_difference(answer, expected)}"
            assert answer.text == expected.text
    return sum(
        min(answer.times) < change.over and max(answer.times) > change.ready
        for change in changes
        for given in answers
        for answer in given
    )


def first_difference(answer: Answer, expected: Answer) -> str:
    at = next((n for n, (a, b) in enumerate(zip(answer.tokens, expected.tokens, strict=False)) if a != b), -1)
    return f"token {at} of {len(expected.tokens)} is {answer.tokens[at : at + 1]}, not {expected.tokens[at : at + 1]}"


def check_end(cluster: Cluster, how: signal.Signals) -> None:
    """The root goes, and with it every rank of every host; workers stay."""
    status = cluster.end_root(how)
    assert status == (-how if how is signal.SIGKILL else 0), cluster.said
    cluster.wait_quiet()
    assert "Traceback" not in cluster.said, cluster.said
    for number, worker in cluster.workers.items():
        assert worker.process.poll() is None, f"worker {number} is gone:\n{cluster.said}"
