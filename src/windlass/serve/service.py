"""State shared by all endpoints: the supervised engine, requests in flight, metrics, the log, and whether the server is draining."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from windlass import __version__
from windlass.core.client import Client, Unavailable
from windlass.core.plan import Plan
from windlass.core.request import Info, Stats, Usage
from windlass.errors import Error, TooLong
from windlass.serve.backend.admission import Load, admit
from windlass.serve.backend.in_flight import CancelReason, InFlightRequest, InFlightRequests
from windlass.serve.backend.quotas import Quotas
from windlass.serve.backend.stored_responses import StoredResponses
from windlass.serve.backend.supervisor import Supervisor
from windlass.serve.http import errors
from windlass.serve.http.body_reader import BodyReader
from windlass.serve.monitor.log import Log, strip_paths
from windlass.serve.monitor.metrics import Metrics, add_engine_metrics
from windlass.serve.monitor.resources import ResourceMonitor
from windlass.serve.settings import ServerSettings
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.requests import TOO_LONG, RequestLimits, too_long_message

NO_STATS = Stats()
MAX_OWNER_CHARACTERS = 64


def cancelled_error(reason: CancelReason) -> ApiError:
    return errors.deadline_exceeded() if reason == "deadline" else errors.shutting_down().with_retry_after(1)


class Service:
    def __init__(
        self,
        client: Client,
        settings: ServerSettings,
        *,
        plan: Plan | None = None,
        log: Log | None = None,
    ) -> None:
        self.settings, self.plan = settings, plan
        self.keys = settings.keys
        self.quotas = Quotas(self.keys)
        self.responses = StoredResponses()
        self.batching: object = None
        """Files and batches (serve/batch), if the server has a folder for them."""
        self.log = log or Log()
        self.supervisor = Supervisor(client, settings.stuck_seconds, self._log_without_paths)
        self.in_flight, self.metrics = InFlightRequests(), Metrics()
        self.resources = ResourceMonitor(tuple(device.total_bytes for device in plan.memory.per_device) if plan else ())
        self.has_page = False
        self.started_at, self.created = time.monotonic(), int(time.time())
        self.draining = asyncio.Event()
        """Set when the server shuts down."""
        self.loading = (0, 0)
        """Bytes of weights loaded, and their total."""
        self.body_reader = BodyReader(
            settings.max_body_bytes, max(settings.max_bodies_bytes, settings.max_body_bytes), settings.head_seconds
        )
        add_engine_metrics(self.metrics, lambda: self.stats, lambda: self.supervisor.restarts)
        self.metrics.gauge("requests_in_flight", "Requests in flight (admitted and not finished).", lambda: len(self.in_flight))
        self.metrics.external_counter("log_lines_lost", "Log lines that could not be written.", lambda: self.log.lost)

    # --- state

    @property
    def client(self) -> Client:
        return self.supervisor.client

    @property
    def state(self) -> str:
        return "draining" if self.draining.is_set() else self.supervisor.state

    @property
    def stats(self) -> Stats:
        info = self.supervisor.info
        return info.stats if info is not None and info.stats is not None else NO_STATS

    @property
    def model(self) -> str:
        """The served model name; may be unknown before the first load."""
        return self.settings.model or (self.supervisor.info.model if self.supervisor.info is not None else "")

    @property
    def fingerprint(self) -> str:
        """Changes with the software and with how the model is run."""
        info = self.info
        text = "|".join((__version__, self.model, info.scheme, info.kv, info.device, str(info.context_tokens)))
        return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def info(self) -> Info:
        """Of a ready engine; otherwise raises the 503 error."""
        supervisor = self.supervisor
        if self.draining.is_set():
            raise errors.shutting_down().with_retry_after(supervisor.retry_seconds)
        if not supervisor.is_ready or supervisor.info is None:
            supervisor.check_now()
            why = errors.loading() if supervisor.info is None else errors.engine_unavailable()
            raise why.with_retry_after(supervisor.retry_seconds)
        return supervisor.info

    @property
    def limits(self) -> RequestLimits:
        settings = self.settings
        return RequestLimits(
            max_n=settings.max_n,
            max_choices=settings.max_batch,
            context_tokens=self.info.context_tokens or None,
            deadline_seconds=settings.deadline_seconds,
            sampling=settings.sampling,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """All that a client may ask for: a router has several (`model_names`), its own first."""
        return tuple(dict.fromkeys((self.model, *getattr(self.client, "model_names", ()))))

    def check_model(self, name: str) -> None:
        if name and name not in self.model_names:
            raise errors.unknown_model(self.model)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.loading = (done_bytes, total_bytes)

    def api_error(self, error: Error, body: object = None) -> ApiError:
        """The response to a failed request. Server errors are logged; an unavailable engine is probed at once."""
        refusal = errors.to_api_error(error, body)
        if refusal.code == TOO_LONG and isinstance(error, TooLong) and self.supervisor.info is not None:
            message = too_long_message(str(refusal), self.supervisor.info.context_tokens)
            return ApiError(message, param=refusal.param, code=refusal.code)
        if refusal.status < 500:
            return refusal
        self._log_without_paths(f"{type(error).__name__}: {error}")
        if isinstance(error, Unavailable):
            self.supervisor.check_now()
        return refusal.with_retry_after(self.supervisor.retry_seconds) if refusal.status == errors.UNAVAILABLE else refusal

    def _log_without_paths(self, text: str) -> None:
        self.log.line(strip_paths(text))

    # --- admission

    def check_quota(self, key: int) -> None:
        """One more request of a key."""
        exceeded = self.quotas.take(key)
        if exceeded is not None:
            raise errors.quota_exceeded(exceeded.limit).with_retry_after(exceeded.retry_seconds)

    def charge(self, key: int, usages: Sequence[Usage]) -> None:
        """What a request of a key has used."""
        prompt, new = sum(one.prompt_tokens for one in usages), sum(one.completion_tokens for one in usages)
        self.quotas.charge(key, prompt + new)
        if key:
            name = self.keys[key - 1].name
            self.metrics.key_tokens.labels(name, "prompt").inc(prompt)
            self.metrics.key_tokens.labels(name, "completion").inc(new)
            self.metrics.key_requests.labels(name).inc()

    @contextmanager
    def admitted(self, num_sequences: int, share: str = "", *, is_timed: bool = True) -> Generator[InFlightRequest]:
        """A context in which the request is in flight. `share`: whose part of the queue it takes (a key, an address). `is_timed`:
        whether its duration counts for Retry-After estimates."""
        load = self.load(share)
        result = admit(load, num_sequences)
        if result.is_impossible:
            raise errors.too_many_sequences(num_sequences, load.capacity)
        if not result.admitted:
            raise errors.queue_full(load.in_flight).with_retry_after(result.retry_seconds)
        with self.in_flight.track(num_sequences, share, is_timed) as flight:
            yield flight

    def load(self, share: str = "") -> Load:
        return Load(
            in_flight=self.in_flight.num_sequences,
            own=self.in_flight.by_share[share],
            num_shares=len(self.in_flight.by_share | {share: 1}),
            max_running=self.info.max_sequences,
            max_waiting=self.settings.max_waiting,
            mean_seconds=self.in_flight.mean_seconds,
        )

    # --- shutdown

    async def drain(self) -> None:
        """Rejects new requests, waits for those in flight, and cancels what is left after `drain_seconds`."""
        if not self.draining.is_set():
            self.draining.set()
            self.log.line(f"draining: {len(self.in_flight)} requests in flight, waiting up to {self.settings.drain_seconds:g} s")
        if not await self.in_flight.wait_idle(self.settings.drain_seconds):
            self.in_flight.cancel_all("shutdown")
            await self.in_flight.wait_idle(1.0)
