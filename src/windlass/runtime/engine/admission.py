"""Requests before they reach the scheduler: grammars being compiled, and deadlines. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from windlass.core.client import Broken
from windlass.errors import Error
from windlass.model.text.tokenize.build import library_reason
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.sample.grammar import CompiledGrammar

SECONDS_TO_WAIT = 0.005
"""For a grammar, if there is nothing else to do, before commands are read again."""
MAX_STALE = 64


class PendingGrammars:
    """Requests whose grammar is not ready yet."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[Submit, float, Future[CompiledGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def __iter__(self) -> Iterator[int]:
        return iter(self._requests)

    def use_adapter(self, name: str) -> bool:
        return any(submit.adapter == name for submit, _, _ in self._requests.values())

    def add(self, submit: Submit, submitted: float, grammar: Future[CompiledGrammar]) -> None:
        self._requests[submit.id] = submit, submitted, grammar

    def drop(self, number: int) -> Submit | None:
        found = self._requests.pop(number, None)
        return None if found is None else found[0]

    def ready(self, may_wait: bool) -> list[tuple[Submit, float, Future[CompiledGrammar]]]:
        """Those whose grammar has been compiled or has failed."""
        futures = [future for _, _, future in self._requests.values()]
        wait(futures, SECONDS_TO_WAIT if may_wait else 0, FIRST_COMPLETED)
        found = [request for request in self._requests.values() if request[2].done()]
        for submit, _, _ in found:
            del self._requests[submit.id]
        return found


def compiled_of(future: Future[CompiledGrammar]) -> CompiledGrammar:
    """Of a future that is done. Whatever the native library raises must not end the engine."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, Error):
        raise error
    why = f"{type(error).__name__}: {library_reason(error)}"
    raise Broken(f"the engine could not compile the constraint, which a worker could: {why}")


class Deadlines:
    """Of running requests, in a heap."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int]] = []
        self._num_present = 0
        """Entries after the last cleanup."""

    def __len__(self) -> int:
        return len(self._due)

    def add(self, due: float, number: int, present: Container[int]) -> None:
        """`present`: all current requests; entries of finished ones are removed once they are the majority."""
        heapq.heappush(self._due, (due, number))
        if len(self._due) > 2 * self._num_present + MAX_STALE:
            self._due = [entry for entry in self._due if entry[1] in present]
            heapq.heapify(self._due)
            self._num_present = len(self._due)

    def expired(self, now: float) -> list[int]:
        found: list[int] = []
        while self._due and self._due[0][0] <= now:
            found.append(heapq.heappop(self._due)[1])
        return found
