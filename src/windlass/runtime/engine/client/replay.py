"""One request across engine restarts: what was returned so far, and what to submit to the next engine so that it continues there.

Sampling depends only on the seed and the number of tokens sampled, so the tokens returned so far are all that the next engine needs. What is
sent once (prompt log-probabilities, prefill statistics) is sent once; the time lost shows in the timings. No torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import time

import msgspec

from windlass.core.client import Unavailable
from windlass.core.request import Timings
from windlass.errors import Error
from windlass.runtime.engine.protocol import Finish, PrefillStats, SequenceOutput, Submit
from windlass.runtime.engine.sample.rng import fresh_seed

MAX_CRASHES = 5
"""Engine crashes a request survives without being found as their cause."""
TRIED_TOKENS = 4
"""So many more, or its end, and a request has not ended its engine again."""


KILLS_ALONE = 3
"""So many ends from outside while an engine had only this one request, and it is their cause after all: it takes all memory, say."""


class EngineMoved(Unavailable):
    """The engine is lost through no fault of a request, and is being restarted elsewhere."""


class EngineKilled(Unavailable):
    """The engine was ended from outside: by somebody, or by a kernel without memory, or because it was stuck."""


class PendingRequest:
    """One task takes its outputs."""

    def __init__(self, number: int, submit: Submit) -> None:
        self.number, self._submit = number, msgspec.structs.replace(_with_seed(submit), id=number)
        self._arrived: list[SequenceOutput] = []
        """Not yet taken."""
        self._error: Error | None = None
        self._waiting: asyncio.Future[None] | None = None
        """Of the task that waits for outputs."""
        self._generated: list[int] = []
        self._num_engines = self._num_crashes = 0
        self._num_generated_before = 0
        """Tokens of other engines."""
        self.suspicion = 0
        """1: it was there when an engine crashed; 2: and was being tried then."""
        self.turn = 0
        """At which its engine got it."""
        self._kills_alone = 0
        self._submitted = self._resubmitted = self._first = time.perf_counter()
        self._prefill: PrefillStats | None = None
        self._is_scored = False

    @property
    def needs_tokenizer(self) -> bool:
        return bool(self._submit.grammar)

    @property
    def urgency(self) -> tuple[int, int, int]:
        """Of suspects the smallest is tried first: a batch's would have to wait for all others."""
        return -self.suspicion, self._submit.priority, self.number

    def next_submit(self) -> Submit:
        """The Submit for an engine: the whole request for the first, the rest for later ones."""
        self._num_engines += 1
        self._num_generated_before = len(self._generated)
        if self._num_engines == 1:
            return self._submit
        self._resubmitted = time.perf_counter()
        return msgspec.structs.replace(
            self._submit,
            generated=list(self._generated),
            prompt_logprobs=None if self._is_scored else self._submit.prompt_logprobs,
            deadline_seconds=None,  # EngineRequests keeps the time
        )

    def survives(self, error: Error, max_crashes: int) -> bool:
        """Whether it is submitted again, to the next engine."""
        if isinstance(error, EngineMoved):
            return True
        if not isinstance(error, Unavailable):
            return False
        self._num_crashes += 1
        return self._num_crashes <= max_crashes

    def is_cause(self, error: Error) -> bool:
        """Of a crash of an engine that had no other request."""
        if not isinstance(error, EngineKilled):
            return self.suspicion > 0
        self._kills_alone += 1
        return self._kills_alone >= KILLS_ALONE

    def forgive(self) -> None:
        """Another one was the cause of what it has been through."""
        self._num_crashes = 0

    @property
    def has_passed(self) -> bool:
        """This engine has gone on with it for a while."""
        return len(self._generated) - self._num_generated_before >= TRIED_TOKENS

    @property
    def submit(self) -> Submit:
        """As it was asked."""
        return self._submit

    @property
    def owner(self) -> str:
        return self._submit.owner

    @property
    def digest(self) -> bytes:
        """Of what an engine was asked, whoever asked, and whatever the seed."""
        return submit_digest(self._submit)

    def take(self, output: SequenceOutput) -> None:
        self._generated += output.token_ids
        if self._num_engines > 1:
            output = self._merge_engines(output)
        if output.prefill is not None:
            self._prefill, self._first = output.prefill, time.perf_counter()
        self._is_scored = self._is_scored or output.prompt_logprobs is not None
        self._arrived.append(output)
        self._wake()

    def fail(self, error: Error) -> None:
        self._error = self._error or error
        self._wake()

    async def outputs(self) -> list[SequenceOutput]:
        """All that have arrived, at least one; raises the error of a request that failed."""
        if not self._arrived and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._error is not None:
            raise self._error
        found, self._arrived = self._arrived, []
        return found

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _merge_engines(self, output: SequenceOutput) -> SequenceOutput:
        prefill = None if output.prefill is None or self._prefill is not None else self._prefill_with_lost_time(output.prefill)
        finish = None if output.finish is None else self._merge_finish(output.finish)
        return msgspec.structs.replace(output, prefill=prefill, finish=finish)

    @property
    def _lost_seconds(self) -> float:
        """Until the current engine got the request."""
        return self._resubmitted - self._submitted

    def _prefill_with_lost_time(self, prefill: PrefillStats) -> PrefillStats:
        return msgspec.structs.replace(prefill, queue_seconds=prefill.queue_seconds + self._lost_seconds)

    def _merge_finish(self, finish: Finish) -> Finish:
        prefill, timings = self._prefill, finish.timings
        if prefill is None:
            timings = msgspec.structs.replace(timings, queue_seconds=timings.queue_seconds + self._lost_seconds)
            return msgspec.structs.replace(finish, timings=timings)
        decode_seconds = time.perf_counter() - self._first
        return msgspec.structs.replace(
            finish,
            usage=msgspec.structs.replace(finish.usage, cached_tokens=prefill.cached_tokens),
            timings=Timings(
                queue_seconds=prefill.queue_seconds, prefill_seconds=prefill.prefill_seconds, decode_seconds=decode_seconds
            ),
        )


def submit_digest(submit: Submit) -> bytes:
    sampling = msgspec.structs.replace(submit.sampling, seed=None)
    asked = msgspec.structs.replace(submit, id=0, sampling=sampling, owner="", cache_salt="", priority=0, deadline_seconds=None)
    return hashlib.sha256(msgspec.msgpack.encode(asked)).digest()


def _with_seed(submit: Submit) -> Submit:
    """The seed is chosen here, so that it survives the engine."""
    sampling = submit.sampling
    if sampling.seed is not None or sampling.is_greedy:
        return submit
    return msgspec.structs.replace(submit, sampling=msgspec.structs.replace(sampling, seed=fresh_seed()))
