"""Asks one model everything that its journal does not have: many requests at once, programs run beside them, every answer kept as it comes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from windlass.core.client import Client
from windlass.core.model import Frozen
from windlass.errors import Error
from windlass.tasks.evaluate.run.ask import OTHER_TOP, Asking, ask
from windlass.tasks.evaluate.run.budget import Budget, Price, Spent, may_ask
from windlass.tasks.evaluate.run.energy import EnergyMeter
from windlass.tasks.evaluate.run.estimate import Speed, estimate
from windlass.tasks.evaluate.run.items import Item, Prepared, current, items, missing, ungraded
from windlass.tasks.evaluate.run.progress import Silent, Tally, Watcher
from windlass.tasks.evaluate.run.records import Journal, Record, decode
from windlass.tasks.evaluate.run.retry import MAX_ATTEMPTS, Attendance, busy_delay_seconds, delay_seconds, kind_of
from windlass.tasks.evaluate.run.settings import Settings
from windlass.tasks.evaluate.run.verdicts import answered, executed, failed
from windlass.tasks.evaluate.sandbox.sandbox import Sandbox
from windlass.tasks.evaluate.tasks.task import Task

SYNC_EVERY = 10
"""Answers; a power failure loses no more. A killed process loses none."""


class How(Frozen):
    """What a run may change from one start to the next: none of it changes an answer."""

    concurrency: int = 8
    deadline_seconds: float = 600.0
    patience_seconds: float = 600.0
    budget: Budget = Budget()
    price: Price = Price()
    watts: float | None = None
    top: int = OTHER_TOP
    confidence: Callable[[Sequence[float]], dict[str, float]] | None = None
    """Of an answer, from the log-probabilities of its tokens; None: they are not asked for."""


DEFAULT = How()


class Runner:
    def __init__(
        self,
        client: Client,
        prepared: Sequence[Prepared],
        settings: Settings,
        journal: Journal,
        how: How = DEFAULT,
        sandbox: Sandbox | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """`sandbox` None: programs are not run, and stay pending."""
        self._client, self._journal, self._how = client, journal, how
        self._settings, self._sandbox, self._watcher = settings, sandbox, watcher or Silent()
        self._asking = {one.task.name: self._asking_of(one) for one in prepared}
        is_interleaved = how.budget != Budget()
        self._items = items(prepared, settings.samples, is_interleaved)
        self._have = current(self._items, {key: decode(payload) for key, payload in journal.records().items()})
        self._waiting = deque(missing(self._items, self._have))
        self._tally = Tally(len(self._items), how.price)
        self._attendance = Attendance(client, how.patience_seconds, self._watcher.note)
        self._meter = EnergyMeter(how.watts)
        self._expected_usd = _mean_usd(self._waiting, {one.task.name: one.task for one in prepared}, how.price)
        self._num_in_flight = self._num_unsynced = 0
        self._begin = self._last = time.monotonic()
        self._syncing: asyncio.Task[None] | None = None
        self.is_stopped_by_budget = False

    def _asking_of(self, one: Prepared) -> Asking:
        how = self._how
        return Asking(
            task=one.task,
            settings=self._settings,
            max_tokens=one.settings.max_tokens,
            deadline_seconds=how.deadline_seconds,
            top=how.top,
            confidence=how.confidence,
        )

    async def run(self) -> Mapping[str, Record]:
        """All records, by key. What is not asked for lack of budget has none."""
        for record in self._have.values():
            self._tally.add(record, is_new=False)
        self._begin = self._last = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for item in ungraded(self._items, self._have):
                    self._execute(item, self._have[item.key], group)
                for _ in range(min(self._how.concurrency, len(self._waiting))):
                    group.create_task(self._work(group))
        except* Error as errors:
            raise _first(errors) from None
        finally:
            await self._synced()
            self._journal.sync()
        return self._have

    @property
    def spent_usd(self) -> float:
        """By this run, not by those it resumed."""
        return self._tally.standing(self._last - self._begin, "").usd

    async def _work(self, group: asyncio.TaskGroup) -> None:
        while self._waiting and self._may_ask():
            item = self._waiting.popleft()
            self._num_in_flight += 1
            try:
                record = await self._answer(item)
            finally:
                self._num_in_flight -= 1
            await self._keep(record, is_new=True)
            if record.verdict == "pending":
                self._execute(item, record, group)

    def _may_ask(self) -> bool:
        seconds = time.monotonic() - self._begin
        standing = self._tally.standing(seconds, "")
        spent = Spent(
            seconds=seconds,
            usd=standing.usd,
            num_answers=standing.num_new,
            longest_seconds=self._tally.longest_seconds,
            expected_usd=self._expected_usd,
        )
        if may_ask(self._how.budget, spent, self._num_in_flight):
            return True
        self.is_stopped_by_budget = True
        return False

    async def _answer(self, item: Item) -> Record:
        asking, attempt, num_busy = self._asking[item.question.task], 1, 0
        until = time.monotonic() + self._how.patience_seconds
        while True:
            began = time.monotonic()
            try:
                reply = await ask(self._client, item.question, item.sample, asking)
                return answered(asking.task, item, reply, attempt)
            except Error as error:
                kind, after = kind_of(error), getattr(error, "retry_after_seconds", None)
                if kind == "busy" and began < until:
                    num_busy += 1
                    await asyncio.sleep(busy_delay_seconds(num_busy, after))
                    continue
                if kind == "wait":
                    await self._attendance.wait(began, error)
                if kind in ("refused", "busy") or attempt >= MAX_ATTEMPTS:
                    return failed(asking.task, item, str(error), attempt)
                attempt += 1
                await asyncio.sleep(delay_seconds(attempt - 1, after))

    def _execute(self, item: Item, record: Record, group: asyncio.TaskGroup) -> None:
        if self._sandbox is None:
            return
        group.create_task(self._judge(item, record, self._sandbox))

    async def _judge(self, item: Item, record: Record, sandbox: Sandbox) -> None:
        task = self._asking[item.question.task].task
        judged = await executed(task, item.question, record, sandbox)
        await self._keep(judged, is_new=False)

    async def _keep(self, record: Record, is_new: bool) -> None:
        now = time.monotonic()
        if is_new:
            joules = self._meter.lap()
            record = msgspec.structs.replace(
                record,
                wall_seconds=round(now - self._last, 4),
                joules=None if joules is None else round(joules, 3),
            )
            self._last = now
        else:
            kept = self._have[record.key]
            record = msgspec.structs.replace(record, wall_seconds=kept.wall_seconds, joules=kept.joules)
        self._have[record.key] = record
        self._journal.record(record.key, msgspec.to_builtins(record), sync=False)
        self._tally.add(record, is_new)
        self._watcher.update(self._tally.standing(now - self._begin, record.task))
        self._num_unsynced += 1
        if self._num_unsynced >= SYNC_EVERY:
            self._num_unsynced = 0
            await self._synced()  # the one before; nobody waits for this one, so that the server stays full
            self._syncing = asyncio.create_task(asyncio.to_thread(self._journal.sync))

    async def _synced(self) -> None:
        """A disk that is full is heard of here."""
        task, self._syncing = self._syncing, None
        if task is not None:
            await task


def _mean_usd(waiting: Sequence[Item], tasks: Mapping[str, Task], price: Price) -> float:
    """Of one answer, before any came."""
    found = estimate(waiting, dict(tasks), Speed(), price)
    return price.usd(found.prompt_tokens, found.answer_tokens, 0.0) / max(len(waiting), 1)


def _first(errors: BaseExceptionGroup[Error]) -> Error:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, Error)
    return found
