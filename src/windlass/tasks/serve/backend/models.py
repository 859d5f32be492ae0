"""The models of a server, loaded on demand and unloaded for one another. Knows engines only as supervisors, and no HTTP.

One task (`run`) loads and unloads, one model at a time, in the order in which they were first asked for. Requests hold a model while
they use it (`using`): it is unloaded only when nobody does. A busy model whose turn is over takes no new requests; they wait like those
of the other model, so none is lost in a swap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal

from windlass.core.client import Busy, Unavailable
from windlass.core.model import Frozen
from windlass.errors import DoesNotFit, Error
from windlass.tasks.serve.backend.residency import LoadedModel, MemoryRoom, fits, idle_for, may_end, to_unload, turn_seconds
from windlass.tasks.serve.backend.supervisor import Supervisor

SlotState = Literal["unloaded", "loading", "loaded", "leaving", "unloading"]
PROCESS_BYTES = 300 * 2**20
"""Of an engine process besides weights and KV cache."""
FAILED_SECONDS = 5.0
"""After a load that failed, requests are refused for so long before it is tried again."""
CHECK_SECONDS = 0.5
MAX_CRASHES = 3
"""Of an engine while it loads."""


class ModelReport(Frozen):
    """Of one model, for /windlass/status."""

    name: str
    state: str
    in_use: int
    waiting: int
    waits_for: str
    loads: int
    num_bytes: int


class ModelSlot:
    """One model of the server."""

    def __init__(self, name: str, supervisor: Supervisor, estimated_bytes: int = 0, max_waiting: int = 64) -> None:
        self.name, self.supervisor = name, supervisor
        self.state: SlotState = "unloaded"
        self.in_use = self.waiting = self.loads = 0
        self.last_used = self.turn_ends = 0.0
        self.error: Error | None = None
        self.failed_at = float("-inf")
        self.waits_for = ""
        """What its requests wait for, in words."""
        self.opened = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.max_waiting = max_waiting
        self.is_preloaded = False
        """Loaded without a request."""
        self._estimated_bytes = estimated_bytes
        self.adapter_bytes = 0
        """Of adapters that were loaded at run time."""
        self.before_load: Callable[[], Awaitable[None]] | None = None
        """Called while no engine runs."""

    @property
    def num_bytes(self) -> int:
        """What it takes when it is loaded: as its engine said, or as its files are large."""
        return self._estimated_bytes + self.adapter_bytes + PROCESS_BYTES

    def learn_size(self) -> None:
        info = self.supervisor.info
        if info is not None and info.weights_bytes:
            self._estimated_bytes = info.weights_bytes + info.kv_bytes

    @property
    def is_open(self) -> bool:
        return self.state == "loaded"

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiting) or (self.is_preloaded and not self.loads)

    @property
    def as_loaded(self) -> LoadedModel:
        return LoadedModel(
            name=self.name, num_bytes=self.num_bytes, in_use=self.in_use, last_used=self.last_used, turn_ends=self.turn_ends
        )

    def report(self) -> ModelReport:
        return ModelReport(
            name=self.name,
            state=self.state,
            in_use=self.in_use,
            waiting=self.waiting,
            waits_for=self.waits_for if self.waiting else "",
            loads=self.loads,
            num_bytes=self.num_bytes if self.state != "unloaded" else 0,
        )


class Models:
    def __init__(
        self,
        slots: Sequence[ModelSlot],
        room: MemoryRoom,
        idle_seconds: float | None = None,
        on_event: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.swaps = 0
        """Models unloaded for another."""
        self._room, self._idle_seconds, self._on_event, self._clock = room, idle_seconds, on_event, clock
        self._wanted: list[ModelSlot] = []
        self._changed = asyncio.Event()
        self._reloads: list[tuple[ModelSlot, Callable[[], None], asyncio.Future[None]]] = []

    def reports(self) -> tuple[ModelReport, ...]:
        return tuple(slot.report() for slot in self.slots.values())

    @asynccontextmanager
    async def using(self, slot: ModelSlot) -> AsyncGenerator[float]:
        """Holds a model that is loaded; yields the seconds for which it was waited."""
        waited = await self._opened(slot)
        slot.in_use += 1  # nothing is awaited between this and the check that it is open
        try:
            yield waited
        finally:
            slot.in_use -= 1
            slot.last_used = self._clock()
            self._changed.set()

    async def _opened(self, slot: ModelSlot) -> float:
        began = self._clock()
        if slot.is_open:
            return 0.0
        if slot.waiting >= slot.max_waiting:
            raise Busy(f"{slot.waiting} requests wait for {slot.name} already")
        slot.waiting += 1
        try:
            while not slot.is_open:
                self._check_failed(slot)
                self.want(slot)
                slot.opened.clear()
                await slot.opened.wait()
        finally:
            slot.waiting -= 1
        return self._clock() - began

    def _check_failed(self, slot: ModelSlot) -> None:
        if slot.error is not None and self._clock() - slot.failed_at < FAILED_SECONDS:
            raise Unavailable(f"{slot.name} could not be loaded: {slot.error}")

    def want(self, slot: ModelSlot) -> None:
        if slot not in self._wanted and not slot.is_open and slot.state != "loading":
            self._wanted.append(slot)
            self._changed.set()

    def has_room(self, slot: ModelSlot) -> bool:
        """Whether all of it fits beside the others that are loaded."""
        return fits([other.as_loaded for other in self._loaded() if other is not slot], slot.num_bytes, self._room)

    async def reload(self, slot: ModelSlot, undo: Callable[[], None]) -> None:
        """Starts a model's engine anew when nobody uses it; requests wait meanwhile. If that fails: calls `undo`, starts it once more, and
        raises what was wrong."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reloads.append((slot, undo, done))
        self._changed.set()
        await asyncio.shield(done)

    # --- the task

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._changed.clear()
                await self._unload_idle()
                while self._reloads:
                    await self._reload(*self._reloads.pop(0))
                while self._wanted and not self._reloads:
                    if self._wanted[0].is_wanted:  # otherwise its clients have gone
                        await self._load_or_fail(self._wanted[0])
                    self._wanted.pop(0)
                await self._wait()
        finally:
            for _, _, done in self._reloads:
                done.cancel()
            for slot in self.slots.values():
                if slot.task is not None:
                    slot.task.cancel()

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SECONDS):
                await self._changed.wait()

    async def _unload_idle(self) -> None:
        for slot in self._loaded():
            if idle_for(slot.as_loaded, self._clock(), self._idle_seconds) and not slot.waiting:
                self._on_event(f"{slot.name}: unloaded, idle for {self._idle_seconds:g} s")
                await self._unload(slot)

    async def _reload(self, slot: ModelSlot, undo: Callable[[], None], done: asyncio.Future[None]) -> None:
        if slot.is_open:
            slot.state, slot.waits_for = "leaving", f"{slot.name} to start anew"
            while slot.in_use:
                await self._pause(CHECK_SECONDS)
            await self._unload(slot)
        error = await self._load(slot)
        if error is None:
            done.set_result(None)
            return
        self._on_event(f"{slot.name} could not be started anew: {error}")
        undo()
        await self._load_or_fail(slot)
        done.set_exception(error)

    async def _load_or_fail(self, slot: ModelSlot) -> None:
        error = await self._load(slot)
        if error is not None:
            self._failed(slot, error)

    async def _load(self, slot: ModelSlot) -> Error | None:
        """An engine that crashes while it loads is started again: its requests have not failed yet. Returns what prevented it."""
        crashes = 0
        while True:
            await self._make_room(slot)
            try:
                await self._start(slot)
                return None
            except DoesNotFit as error:
                others = self._loaded()
                if not others:
                    return error
                oldest = min(others, key=lambda other: (other.in_use > 0, other.last_used))
                self._on_event(f"{slot.name} does not fit beside {', '.join(other.name for other in others)}")
                await self._leave(oldest, slot)
            except Unavailable as error:
                crashes += 1
                if crashes == MAX_CRASHES:
                    return error
                self._on_event(f"{slot.name}: its engine failed while it loaded ({error}); once more")
            except Error as error:
                return error

    async def _make_room(self, slot: ModelSlot) -> None:
        loaded = [other.as_loaded for other in self._loaded()]
        for name in to_unload(loaded, slot.num_bytes, self._room):
            await self._leave(self.slots[name], slot)

    async def _leave(self, leaving: ModelSlot, wanted: ModelSlot) -> None:
        """Unloads a model for another: after its turn, when what runs has finished."""
        wanted.waits_for = (
            f"{leaving.name} to finish {leaving.in_use} requests" if leaving.in_use else f"{leaving.name} to unload"
        )
        while not may_end(leaving.as_loaded, self._clock()):
            await self._pause(max(0.01, min(CHECK_SECONDS, leaving.turn_ends - self._clock())))
        leaving.state = "leaving"
        while leaving.in_use:
            await self._pause(CHECK_SECONDS)
        self.swaps += 1
        self._on_event(f"{leaving.name}: unloaded for {wanted.name}")
        await self._unload(leaving)
        if leaving.waiting:
            self.want(leaving)

    async def _pause(self, seconds: float) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _start(self, slot: ModelSlot) -> None:
        slot.state, slot.waits_for, slot.error = "loading", f"{slot.name} to load", None
        began = self._clock()
        try:
            if slot.before_load is not None:
                await slot.before_load()
            slot.task = asyncio.create_task(slot.supervisor.run())
            await slot.supervisor.wait_ready()
        except Error:
            await self._unload(slot)
            raise
        slot.loads += 1
        slot.learn_size()
        slot.last_used = self._clock()
        slot.turn_ends = slot.last_used + turn_seconds(slot.last_used - began)
        slot.state, slot.waits_for = "loaded", ""
        slot.opened.set()
        while slot.waiting and slot.is_open:  # whoever waited gets it before it may be unloaded again
            await asyncio.sleep(0)

    async def _unload(self, slot: ModelSlot) -> None:
        slot.state = "unloading"
        if slot.task is not None:
            slot.task.cancel()
            await asyncio.gather(slot.task, return_exceptions=True)
            slot.task = None
        with suppress(Error):
            await slot.supervisor.unload()
        slot.state = "unloaded"

    def _failed(self, slot: ModelSlot, error: Error) -> None:
        slot.error, slot.failed_at = error, self._clock()
        self._on_event(f"{slot.name} could not be loaded: {error}")
        slot.opened.set()

    def _loaded(self) -> list[ModelSlot]:
        return [slot for slot in self.slots.values() if slot.state == "loaded"]
