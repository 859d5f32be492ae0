"""What all routes share: the engine under its supervisor, who is in flight, the numbers, the log, and whether the server is ending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager

from windlass.core.client import Client, Unavailable
from windlass.core.plan import Plan
from windlass.core.request import Info, Stats
from windlass.errors import Error
from windlass.serve.backend.admission import Load, admit
from windlass.serve.backend.in_flight import Flight, Flights
from windlass.serve.backend.supervisor import Supervisor
from windlass.serve.http import errors as failures
from windlass.serve.http.body_reader import Bodies
from windlass.serve.monitor.log import Log, without_paths
from windlass.serve.monitor.metrics import Metrics, add_engine_gauges
from windlass.serve.monitor.resources import Machine
from windlass.serve.settings import Settings
from windlass.wire.schema.errors import Refusal
from windlass.wire.schema.sampling import CommonRequest
from windlass.wire.server.requests import Limits

NO_STATS = Stats()
OWNER_CHARACTERS = 64


class Service:
    def __init__(
        self,
        client: Client,
        settings: Settings,
        *,
        plan: Plan | None = None,
        log: Log | None = None,
    ) -> None:
        self.settings, self.plan = settings, plan
        self.log = log or Log()
        self.supervisor = Supervisor(client, settings.stuck_seconds, self.log.line)
        self.flights, self.metrics = Flights(), Metrics()
        self.machine = Machine(tuple(device.total_bytes for device in plan.memory.per_device) if plan else ())
        self.has_page = False
        self.started_at, self.created = time.monotonic(), int(time.time())
        self.ending = asyncio.Event()
        """Set when the server drains."""
        self.loading = (0, 0)
        """Bytes of weights read, and of how many."""
        self.bodies = Bodies(
            settings.max_body_bytes, max(settings.max_bodies_bytes, settings.max_body_bytes), settings.head_seconds
        )
        add_engine_gauges(self.metrics, lambda: self.stats, lambda: self.supervisor.restarts)
        self.metrics.gauge("requests_in_flight", "Requests that were let in and have not ended.", lambda: len(self.flights))
        self.metrics.counter_of("log_lines_lost", "Log lines that could not be written.", lambda: self.log.lost)

    # --- what is there

    @property
    def client(self) -> Client:
        return self.supervisor.client

    @property
    def state(self) -> str:
        return "draining" if self.ending.is_set() else self.supervisor.state

    @property
    def stats(self) -> Stats:
        info = self.supervisor.info
        return info.stats if info is not None and info.stats is not None else NO_STATS

    @property
    def model(self) -> str:
        """Before the first load its name may not be known."""
        return self.settings.model or (self.supervisor.info.model if self.supervisor.info is not None else "")

    @property
    def info(self) -> Info:
        """Of an engine that is ready; otherwise a Refusal."""
        supervisor = self.supervisor
        if self.ending.is_set():
            raise failures.closing().after(supervisor.retry_seconds)
        if not supervisor.is_ready or supervisor.info is None:
            supervisor.suspect()
            why = failures.loading() if supervisor.info is None else failures.engine_gone()
            raise why.after(supervisor.retry_seconds)
        return supervisor.info

    @property
    def limits(self) -> Limits:
        settings = self.settings
        return Limits(
            max_n=settings.max_n,
            max_choices=settings.max_batch,
            context_tokens=self.info.context_tokens or None,
            deadline_seconds=settings.deadline_seconds,
            sampling=settings.sampling,
        )

    def check_model(self, asked: str) -> None:
        if asked and asked != self.model:
            raise failures.unknown_model(self.model)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.loading = (done_bytes, total_bytes)

    def failed(self, error: Error, body: CommonRequest | None = None) -> Refusal:
        """What is told of it. An engine that is not there is looked after at once."""
        refusal = failures.refused(error, body)
        if refusal.status < 500:
            return refusal
        self.log.line(without_paths(f"{type(error).__name__}: {error}"))
        if isinstance(error, Unavailable):
            self.supervisor.suspect()
        return refusal.after(self.supervisor.retry_seconds) if refusal.status == failures.UNAVAILABLE else refusal

    # --- who is let in

    @contextmanager
    def admitted(self, num_sequences: int, *, is_timed: bool = True) -> Generator[Flight]:
        """`is_timed`: whether how long it takes says something of when others have room."""
        load = self.load
        verdict = admit(load, num_sequences)
        if verdict.never:
            raise failures.never(num_sequences, load.capacity)
        if not verdict.admitted:
            raise failures.full(load.in_flight).after(verdict.retry_seconds)
        with self.flights.opened(num_sequences, is_timed) as flight:
            yield flight

    @property
    def load(self) -> Load:
        return Load(
            in_flight=self.flights.in_flight,
            max_running=self.info.max_sequences,
            max_waiting=self.settings.max_waiting,
            seconds_each=self.flights.seconds_each,
        )

    # --- the end

    async def drain(self) -> None:
        """Lets in nobody more; what runs has its time, then it is ended."""
        if not self.ending.is_set():
            self.ending.set()
            self.log.line(f"draining: {len(self.flights)} in flight, at most {self.settings.drain_seconds:g} s")
        if not await self.flights.all_ended(self.settings.drain_seconds):
            self.flights.end_all("closing")
            await self.flights.all_ended(1.0)
