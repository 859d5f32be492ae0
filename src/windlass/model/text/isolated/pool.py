"""What the client of an engine asks: chats rendered, and grammars looked at before the engine compiles them.

Every job runs in the quick lane first. One that is too long for it is ended, and begun again in the slow lane, alone and with low priority; so
what takes long holds up only others that do. For a while its group goes there at once, until it does well, and its grammars are refused if
they keep coming. Grammars have processes of their own, so that no chat waits while a tokenizer is prepared.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import msgspec

from windlass.core.client import Broken, Unavailable
from windlass.errors import BadInput
from windlass.model.text.isolated.jobs import Answer, Compilation, Rendering
from windlass.model.text.isolated.lanes import Job, Lane
from windlass.model.text.isolated.offenders import Offenders, group_of
from windlass.model.text.isolated.process import MEMORY_BYTES, Vocabulary
from windlass.model.text.isolated.workers import Worker, Workers

NUM_QUICK = 2
QUICK_SECONDS = 0.05
SLOW_SECONDS = 1.0
"""CPU time. What an engine compiles again takes as long there."""
REMEMBERED_SECONDS = 60.0
MOST_ENDED = 5
"""Grammars of a group within that time; with more, its new ones are refused. Its chats never are: who has no key may share an address."""
MAX_ANSWERS = 1000
LIMITS = f"{SLOW_SECONDS:g} s of CPU time or {MEMORY_BYTES // 2**20} MiB of memory"


class IsolatedPool:
    def __init__(self, vocabulary: Callable[[], Vocabulary] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`vocabulary`: is asked for with the first grammar, in a thread."""
        self._vocabulary, self._clock = vocabulary, clock
        self._templates = Workers()
        self._grammars: Workers | None = None
        self._preparing = asyncio.Lock()
        self._quick = Lane(lambda kind: self._worker(kind, is_slow=False), NUM_QUICK, QUICK_SECONDS, is_limited=False)
        self._slow = Lane(lambda kind: self._worker(kind, is_slow=True), 1, SLOW_SECONDS)
        self._answers: OrderedDict[bytes, tuple[Answer, float]] = OrderedDict()
        """Of grammars, by their digest, and until when."""
        self._compiling: dict[tuple[str, bytes], _Shared] = {}
        """Of a group: another has its own turns and limits."""
        self._is_closed = False
        self._by_chats, self._by_grammars = (Offenders(MOST_ENDED, REMEMBERED_SECONDS, clock) for _ in range(2))

    def start(self) -> None:
        """Before the first chat, while something else goes on."""
        if not self._is_closed and not self._templates.is_started:
            self._templates.start()

    async def render(self, template: str, values: Mapping[str, Any], owner: str = "") -> str:
        """`owner`: GROUP/USER."""
        job = Rendering(template=template, values=dict(values))
        answer = await self._run(job, group_of(owner), self._by_chats)
        if answer is None:
            raise BadInput(f"the chat template needs more than {LIMITS} for these messages", field="messages")
        return _text(answer)

    async def check_grammar(self, grammar: str, owner: str = "") -> bool:
        """Returns if it can be compiled within the limits: whether that takes long."""
        digest = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        found = self._known(digest) or await self._compiled(digest, grammar, group_of(owner))
        _text(found)
        return found.cpu_seconds > QUICK_SECONDS

    def close(self) -> None:
        self._is_closed = True
        for lane in (self._quick, self._slow):
            lane.close()
        for workers in (self._templates, self._grammars):
            if workers is not None:
                workers.close()

    # --- grammars

    def _known(self, digest: bytes) -> Answer | None:
        answer, until = self._answers.get(digest, (None, inf))
        if answer is None or self._clock() >= until:
            return None
        self._answers.move_to_end(digest)
        return answer

    def _keep(self, digest: bytes, answer: Answer, until: float) -> None:
        self._answers[digest] = answer, until
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    async def _compiled(self, digest: bytes, grammar: str, group: str) -> Answer:
        """Asked several times at once it is compiled once; when nobody waits any more it is ended."""
        key = group, digest
        shared = self._compiling.get(key)
        if shared is None:
            shared = self._compiling[key] = _Shared(self._compile(digest, grammar, group))
        try:
            return await shared.wait()
        finally:
            if shared.num_waiting == 0:
                del self._compiling[key]  # first: nobody may come to one that is being ended
                shared.end()

    async def _compile(self, digest: bytes, grammar: str, group: str) -> Answer:
        self._by_grammars.check(group)
        workers = await self._grammar_workers()
        answer = await self._run(Compilation(grammar=grammar), group, self._by_grammars)
        if answer is None:  # of this worker, at this time: it may have been ended by somebody else
            why = "it is too large, or nested too deeply; simplify it"
            answer = Answer(error=f"the constraint needs more than {LIMITS} to be compiled: {why}", field="constraint")
            self._keep(digest, answer, self._clock() + REMEMBERED_SECONDS)
        elif not answer.is_foreign:
            workers.has_compiled = True
            self._keep(digest, answer, inf)
        return answer

    async def _grammar_workers(self) -> Workers:
        async with self._preparing:
            if self._grammars is None:
                self._grammars = Workers(await asyncio.to_thread(self._packed_vocabulary))
            return self._grammars

    def _packed_vocabulary(self) -> bytes:
        return b"" if self._vocabulary is None else msgspec.msgpack.encode(self._vocabulary())

    # --- lanes

    async def _run(self, job: Job, group: str, offenders: Offenders) -> Answer | None:
        if self._is_closed:
            raise Unavailable("this client is closed")
        is_suspect = offenders.is_suspect(group)
        if not is_suspect:
            answer = await self._quick.run(job, group)
            if answer is not None:
                return answer
            offenders.note(group)
        answer = await self._slow.run(job, group)
        if is_suspect and answer is None:
            offenders.note(group)
        elif is_suspect and answer is not None and answer.cpu_seconds <= QUICK_SECONDS:
            offenders.clear(group)
        return answer

    def _worker(self, kind: type[Job], is_slow: bool) -> Worker:
        workers = self._templates if kind is Rendering else self._grammars
        if self._is_closed or workers is None:
            raise Unavailable("this client is closed")
        return workers.another(is_slow)


class _Shared:
    """A task for all who wait for it."""

    def __init__(self, work: Any) -> None:
        self._task: asyncio.Task[Answer] = asyncio.ensure_future(work)
        self._task.add_done_callback(_mark_retrieved)
        self.num_waiting = 0

    async def wait(self) -> Answer:
        self.num_waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self.num_waiting -= 1

    def end(self) -> None:
        self._task.cancel()


def _mark_retrieved(task: asyncio.Task[Any]) -> None:
    """Whoever waited may have left, so that nobody sees its error."""
    if not task.cancelled():
        task.exception()


def _text(answer: Answer) -> str:
    if answer.is_foreign:
        raise Broken(answer.error)
    if answer.error:
        raise BadInput(answer.error, field=answer.field)
    return answer.text
