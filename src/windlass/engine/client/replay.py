"""One request over the lives of several engines: what it was given so far, and what the next engine is asked so that it goes on there.

An engine draws by a request's seed and by how many it has drawn, so tokens that were given out are all that the next one must know. What
is told once (log-probabilities of the prompt, when it began) is told once; the time that was lost shows in the times only. No torch.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from windlass.core.client import Unavailable
from windlass.core.request import Timings
from windlass.engine.protocol import Finish, PrefillStats, SequenceOutput, Submit
from windlass.engine.sample.rng import fresh_seed
from windlass.errors import Error

MAX_CRASHES = 1
"""Engines that may break under a request before it fails with them: it may be the one that breaks them."""


class EngineMoved(Unavailable):
    """An engine is gone for a reason that no request can be blamed for, and goes on elsewhere."""


class PendingRequest:
    """`arrived` has what came and was not taken yet: outputs, or an error, which is the last."""

    def __init__(self, number: int, submit: Submit) -> None:
        self.number, self._submit = number, msgspec.structs.replace(_seeded(submit), id=number)
        self.arrived: asyncio.Queue[SequenceOutput | Error] = asyncio.Queue()
        self._answered: list[int] = []
        self._num_lives = self._num_crashes = 0
        self._submitted = self._resubmitted = self._first = time.perf_counter()
        self._prefill: PrefillStats | None = None
        self._is_scored = False

    @property
    def needs_words(self) -> bool:
        return bool(self._submit.grammar)

    def asked(self) -> Submit:
        """What an engine is asked: the first one everything, the next what is left."""
        self._num_lives += 1
        if self._num_lives == 1:
            return self._submit
        self._resubmitted = time.perf_counter()
        return msgspec.structs.replace(
            self._submit,
            generated=list(self._answered),
            prompt_logprobs=None if self._is_scored else self._submit.prompt_logprobs,
            deadline_seconds=None,  # whoever waits here counts on
        )

    def survives(self, error: Error, max_crashes: int) -> bool:
        """Whether it may be asked again, of the next engine."""
        if isinstance(error, EngineMoved):
            return True
        if not isinstance(error, Unavailable):
            return False
        self._num_crashes += 1
        return self._num_crashes <= max_crashes

    def take(self, output: SequenceOutput) -> None:
        self._answered += output.token_ids
        if self._num_lives > 1:
            output = self._as_one_life(output)
        if output.prefill is not None:
            self._prefill, self._first = output.prefill, time.perf_counter()
        self._is_scored = self._is_scored or output.prompt_logprobs is not None
        self.arrived.put_nowait(output)

    def fail(self, error: Error) -> None:
        self.arrived.put_nowait(error)

    def _as_one_life(self, output: SequenceOutput) -> SequenceOutput:
        prefill = None if output.prefill is None or self._prefill is not None else self._prefill_with_lost_time(output.prefill)
        finish = None if output.finish is None else self._finished(output.finish)
        return msgspec.structs.replace(output, prefill=prefill, finish=finish)

    @property
    def _lost_seconds(self) -> float:
        """Until the engine that answers was asked."""
        return self._resubmitted - self._submitted

    def _prefill_with_lost_time(self, prefill: PrefillStats) -> PrefillStats:
        return msgspec.structs.replace(prefill, queue_seconds=prefill.queue_seconds + self._lost_seconds)

    def _finished(self, finish: Finish) -> Finish:
        prefill, timings = self._prefill, finish.timings
        if prefill is None:
            timings = msgspec.structs.replace(timings, queue_seconds=timings.queue_seconds + self._lost_seconds)
            return msgspec.structs.replace(finish, timings=timings)
        decoding = time.perf_counter() - self._first
        return msgspec.structs.replace(
            finish,
            usage=msgspec.structs.replace(finish.usage, cached_tokens=prefill.cached_tokens),
            timings=Timings(
                queue_seconds=prefill.queue_seconds, prefill_seconds=prefill.prefill_seconds, decode_seconds=decoding
            ),
        )


def _seeded(submit: Submit) -> Submit:
    """The seed is drawn here, where no engine's end can lose it."""
    sampling = submit.sampling
    if sampling.seed is not None or sampling.is_greedy:
        return submit
    return msgspec.structs.replace(submit, sampling=msgspec.structs.replace(sampling, seed=fresh_seed()))
