"""What the client of an engine asks: chats rendered, and grammars looked at before the engine compiles them.

Every job runs in the quick lane first. One that is too long for it is ended, and begun again in the slow lane, alone and with low priority; so
what takes long holds up only others that do. For a while its group goes there at once, and its grammars are refused if they keep coming.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from windlass.core.client import Broken, Unavailable
from windlass.errors import BadInput
from windlass.model.text.isolated.jobs import Answer, Compilation, Rendering
from windlass.model.text.isolated.lanes import Lane
from windlass.model.text.isolated.offenders import Offenders, group_of
from windlass.model.text.isolated.process import MEMORY_BYTES, Vocabulary
from windlass.model.text.isolated.workers import Workers

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
        """`vocabulary`: is asked for with the first grammar."""
        self._workers = Workers(vocabulary)
        self._quick = Lane(lambda: self._workers.another(is_slow=False), NUM_QUICK, QUICK_SECONDS)
        self._slow = Lane(lambda: self._workers.another(is_slow=True), 1, SLOW_SECONDS)
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        """Of grammars, by their digest."""
        self._compiling: dict[bytes, _Shared] = {}
        self._is_closed = False
        self._by_chats, self._by_grammars = (Offenders(MOST_ENDED, REMEMBERED_SECONDS, clock) for _ in range(2))

    def start(self) -> None:
        """Before the first job, while something else goes on."""
        if not self._is_closed and not self._workers.is_started:
            self._workers.start()

    async def render(self, template: str, values: Mapping[str, Any], owner: str = "") -> str:
        """`owner`: GROUP/USER."""
        job = Rendering(template=template, values=dict(values))
        answer = await self._run(job, group_of(owner), self._by_chats)
        if answer is None:
            raise BadInput(f"the chat template needs more than {LIMITS} for these messages", field="messages")
        return _text(answer)

    async def check_grammar(self, grammar: str, owner: str = "") -> None:
        """Returns if it can be compiled within the limits."""
        digest = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        answer = self._answers.get(digest)
        if answer is None:
            answer = await self._compiled(digest, grammar, group_of(owner))
        else:
            self._answers.move_to_end(digest)
        _text(answer)

    def close(self) -> None:
        self._is_closed = True
        for lane in (self._quick, self._slow):
            lane.renew()
        self._workers.close()

    # --- grammars

    async def _compiled(self, digest: bytes, grammar: str, group: str) -> Answer:
        """Asked several times at once it is compiled once; when nobody waits any more it is ended."""
        shared = self._compiling.get(digest)
        if shared is None:
            shared = self._compiling[digest] = _Shared(self._compile(digest, grammar, group))
        try:
            return await shared.wait()
        finally:
            if shared.num_waiting == 0 and self._compiling.get(digest) is shared:
                del self._compiling[digest]

    async def _compile(self, digest: bytes, grammar: str, group: str) -> Answer:
        if not self._is_closed and self._workers.teach():
            self._quick.renew()
            self._slow.renew()
        self._by_grammars.check(group)
        answer = await self._run(Compilation(grammar=grammar), group, self._by_grammars)
        self._workers.has_compiled |= answer is not None
        if answer is None:
            why = "it is too large, or nested too deeply; simplify it"
            answer = Answer(error=f"the constraint needs more than {LIMITS} to be compiled: {why}", field="constraint")
        if not answer.is_foreign:
            self._answers[digest] = answer
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        return answer

    # --- lanes

    async def _run(self, job: Rendering | Compilation, group: str, offenders: Offenders) -> Answer | None:
        if self._is_closed:
            raise Unavailable("this client is closed")
        is_suspect = offenders.recent(group) > 0
        if not is_suspect:
            answer = await self._quick.run(job, group)
            if answer is not None:
                return answer
            offenders.note(group)
        answer = await self._slow.run(job, group)
        if answer is None and is_suspect:
            offenders.note(group)
        return answer


class _Shared:
    """A task for all who wait for it, ended with the last of them."""

    def __init__(self, work: Any) -> None:
        self._task: asyncio.Task[Answer] = asyncio.ensure_future(work)
        self.num_waiting = 0

    async def wait(self) -> Answer:
        self.num_waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self.num_waiting -= 1
            if self.num_waiting == 0 and not self._task.done():
                self._task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._task


def _text(answer: Answer) -> str:
    if answer.is_foreign:
        raise Broken(f"a library failed in a way that was not expected: {answer.error}")
    if answer.error:
        raise BadInput(answer.error, field=answer.field)
    return answer.text
