"""State shared by all endpoints: the supervised engine, requests in flight, metrics, the log, and whether the server is draining."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

from windlass import __version__
from windlass.core.client import Client, Unavailable
from windlass.core.metrics import serving
from windlass.core.metrics.metric import Metric
from windlass.core.plan import Plan
from windlass.core.ports import Watching
from windlass.core.request import Delta, Info, Stats, Usage
from windlass.core.tiers.stats import total_tiers
from windlass.errors import Error, TooLong
from windlass.tasks.serve.backend.admission import Load, admit
from windlass.tasks.serve.backend.in_flight import CancelReason, InFlightRequest, InFlightRequests
from windlass.tasks.serve.backend.models import Models, ModelSlot
from windlass.tasks.serve.backend.quotas import Quotas
from windlass.tasks.serve.backend.stored_responses import StoredResponses
from windlass.tasks.serve.backend.supervisor import Supervisor
from windlass.tasks.serve.http import errors
from windlass.tasks.serve.http.body_reader import BodyReader
from windlass.tasks.serve.monitor.energy import RequestEnergy
from windlass.tasks.serve.monitor.log import Log, strip_paths
from windlass.tasks.serve.monitor.metrics import Metrics, Readings, add_engine_metrics
from windlass.tasks.serve.monitor.resources import ResourceMonitor
from windlass.tasks.serve.monitor.traces import RequestSpan, TraceExporter
from windlass.tasks.serve.settings import ServerSettings
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.requests import TOO_LONG, RequestLimits, too_long_message

NO_STATS = Stats()
SUMMED = (
    "waiting", "running", "num_blocks", "blocks_used", "blocks_cached", "prompt_tokens", "completion_tokens", "prefix_query_tokens",
    "prefix_hit_tokens", "preemptions", "steps",
)  # fmt: skip


def cancelled_error(reason: CancelReason) -> ApiError:
    if reason == "operator":
        return errors.cancelled_by_operator()
    return errors.deadline_exceeded() if reason == "deadline" else errors.shutting_down().with_retry_after(1)


@lru_cache(maxsize=64)
def _fingerprint(text: str) -> str:
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class Service:
    def __init__(
        self,
        client: Client,
        settings: ServerSettings,
        *,
        plan: Plan | None = None,
        log: Log | None = None,
        beside: Service | None = None,
        num_bytes: int = 0,
    ) -> None:
        """`beside`: the first of a server of several models, with which keys, limits, responses, metrics and log are shared. `num_bytes`:
        what the model will take, as far as that is known."""
        self.settings, self.plan = settings, plan
        self.keys = settings.keys
        self.quotas = beside.quotas if beside else Quotas(self.keys)
        self.responses = beside.responses if beside else StoredResponses()
        self.batching: object = None
        """Files and batches (tasks/serve/batch), if the server has a folder for them."""
        self.log = beside.log if beside else log or Log()
        self.supervisor = Supervisor(client, settings.stuck_seconds, self._log_without_paths)
        self.in_flight = InFlightRequests(beside.in_flight if beside else None)
        self.metrics = beside.metrics if beside else Metrics()
        self.slot = ModelSlot(settings.model, self.supervisor, num_bytes, settings.max_waiting)
        self.group: tuple[Service, ...] = (self,)
        """All models of this server, this one included."""
        self.models: Models | None = None
        """What loads and unloads them; None: there is one model, which stays loaded."""
        self.resources = ResourceMonitor(tuple(device.total_bytes for device in plan.memory.per_device) if plan else ())
        self.has_page = False
        self.adapters: dict[str, str] = dict(settings.adapters)
        """LoRA adapters by name, and where they are."""
        self.adapter_keys: dict[str, str] = {}
        """What the engine calls them, where that is not their name: another adapter may have had it before."""
        self.runtime_adapters: object = None
        """What loads and unloads adapters while the server runs (tasks/serve/lora), if it may."""
        self.started_at, self.created = time.monotonic(), int(time.time())
        self.draining = beside.draining if beside else asyncio.Event()
        """Set when the server shuts down."""
        self.loading = (0, 0)
        """Bytes of weights loaded, and their total."""
        self.body_reader = (
            beside.body_reader
            if beside
            else BodyReader(
                settings.max_body_bytes, max(settings.max_bodies_bytes, settings.max_body_bytes), settings.head_seconds
            )
        )
        self.energy = beside.energy if beside else RequestEnergy(self.resources.joules, self._is_loading, self.all_in_flight)
        self.traces: TraceExporter | None = beside.traces if beside else None
        self.watch: Watching | None = None
        """Keeps a day of numbers and evaluates alert rules."""
        self.last_metrics = ""
        """The text of /metrics as of the last tick of the watch."""
        if beside is None:
            self._add_metrics()

    def _is_loading(self) -> bool:
        return all(one.supervisor.info is None for one in self.group)

    def _num_in_flight(self) -> int:
        return sum(len(one.in_flight) for one in self.group)

    def all_in_flight(self) -> list[InFlightRequest]:
        """Of all models of this server."""
        return [flight for one in self.group for flight in one.in_flight.requests]

    def _add_metrics(self) -> None:
        """Of all models of this server."""
        self.energy.add_metrics(self.metrics)
        restarts = lambda: sum(one.supervisor.restarts for one in self.group)  # noqa: E731
        add_engine_metrics(self.metrics, lambda: total_stats([one.stats for one in self.group]), restarts)
        self.metrics.read(serving.ENGINE_UP, lambda: any(one.supervisor.is_ready for one in self.group))
        self.metrics.read(serving.REQUESTS_IN_FLIGHT, self._num_in_flight)
        self.metrics.read(serving.LOG_LINES_LOST, lambda: self.log.lost)
        for metric in serving.FLEET:
            self.metrics.read_all(metric, partial(self._client_readings, metric))

    # --- state

    def _client_readings(self, metric: Metric) -> Readings:
        """Of a client that has metrics of its own: a fleet's hosts and ranks."""
        read: Callable[[], Mapping[Metric, Readings]] | None = getattr(self.client, "readings", None)
        return () if read is None else read().get(metric, ())

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
        return _fingerprint(text)

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
    def names(self) -> list[str]:
        """Of all models of this server."""
        return [name for one in self.group for name in one.own_names]

    @property
    def own_names(self) -> list[str]:
        """The model's, those of its adapters, and those of a router."""
        return [self.model, *(f"{self.model}:{adapter}" for adapter in self.adapters), *self.routed_names]

    @property
    def routed_names(self) -> tuple[str, ...]:
        """What a router can be asked for beside its own name."""
        return tuple(name for name in getattr(self.client, "model_names", ()) if name != self.model)

    def knows(self, name: str) -> bool:
        return not name or name == self.model or name in self.routed_names or self._adapter(name) is not None

    def _adapter(self, name: str) -> str | None:
        """`MODEL:ADAPTER`, or the adapter's name alone."""
        found = name.removeprefix(f"{self.model}:")
        return found if found in self.adapters else None

    def check_model(self, name: str) -> str:
        """The adapter that a name means; empty: the model itself."""
        if not self.knows(name):
            raise errors.unknown_model(self.names)
        return self._adapter(name) or "" if name and name != self.model else ""

    def engine_adapter(self, adapter: str) -> str:
        return self.adapter_keys.get(adapter, adapter)

    def shown_model(self, adapter: str) -> str:
        return f"{self.model}:{adapter}" if adapter else self.model

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.loading = (done_bytes, total_bytes)

    def api_error(self, error: Error, body: object = None, request_id: str = "") -> ApiError:
        """The response to a failed request. Server errors are logged, under its id; an unavailable engine is probed at once."""
        refusal = errors.to_api_error(error, body, request_id)
        if refusal.code == TOO_LONG and isinstance(error, TooLong) and self.supervisor.info is not None:
            message = too_long_message(str(refusal), self.supervisor.info.context_tokens)
            return ApiError(message, param=refusal.param, code=refusal.code)
        if refusal.status < 500:
            return refusal
        under = f"{request_id}: " if request_id else ""
        self.log.line(f"{under}{strip_paths(f'{type(error).__name__}: {error}')}")
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

    def admitted(self, num_sequences: int, share: str = "", *, is_timed: bool = True) -> AbstractContextManager[InFlightRequest]:
        """A context in which the request is in flight. `share`: whose part of the queue it takes (a key, an address). `is_timed`:
        whether its duration counts for Retry-After estimates."""
        load = self.load(share)
        result = admit(load, num_sequences)
        if result.is_impossible:
            raise errors.too_many_sequences(num_sequences, load.capacity)
        if not result.admitted:
            raise errors.queue_full(load.in_flight).with_retry_after(result.retry_seconds)
        return self.in_flight.track(num_sequences, share, is_timed)

    def load(self, share: str = "") -> Load:
        return Load(
            in_flight=self.in_flight.num_sequences,
            own=self.in_flight.by_share[share],
            num_shares=len(self.in_flight.by_share) + (share not in self.in_flight.by_share),
            max_running=self.info.max_sequences,
            max_waiting=self.settings.max_waiting,
            mean_seconds=self.in_flight.mean_seconds,
        )

    def request_ended(self, flight: InFlightRequest, path: str, usages: Sequence[Usage], ends: Sequence[Delta]) -> None:
        """Its energy, and its span if there is somebody to send it to."""
        joules = self.energy.end(flight, self.model)
        if self.traces is None:
            return
        timings = [end.timings for end in ends if end.timings is not None]
        seconds = time.perf_counter() - flight.started
        self.traces.add(
            RequestSpan(
                operation="text_completion" if path.endswith("/completions") and "chat" not in path else "chat",
                model=self.model,
                began=time.time() - seconds,
                seconds=seconds,
                outcome=flight.cancel_reason or (str(ends[0].finish_reason) if ends else "error"),
                prompt_tokens=sum(usage.prompt_tokens for usage in usages),
                completion_tokens=sum(usage.completion_tokens for usage in usages),
                cached_tokens=sum(usage.cached_tokens for usage in usages),
                reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
                queue_seconds=max((one.queue_seconds for one in timings), default=0.0),
                prefill_seconds=max((one.prefill_seconds for one in timings), default=0.0),
                decode_seconds=max((one.decode_seconds for one in timings), default=0.0),
                first_token_seconds=None if flight.first_token is None else flight.first_token - flight.started,
                energy_joules=joules,
            )
        )

    # --- shutdown

    async def drain(self) -> None:
        """Rejects new requests, waits for those in flight, and cancels what is left after `drain_seconds`."""
        if not self.draining.is_set():
            self.draining.set()
            count = sum(len(one.in_flight) for one in self.group)
            self.log.line(f"draining: {count} requests in flight, waiting up to {self.settings.drain_seconds:g} s")
        await asyncio.gather(*(one.drain_own() for one in self.group))

    async def drain_own(self) -> None:
        """Of this model alone."""
        if not await self.in_flight.wait_idle(self.settings.drain_seconds):
            self.in_flight.cancel_all("shutdown")
            await self.in_flight.wait_idle(1.0)

    def cancel_all(self) -> None:
        for one in self.group:
            one.in_flight.cancel_all("shutdown")


def total_stats(each: Sequence[Stats]) -> Stats:
    """Sums over the models of a server."""
    if len(each) == 1:
        return each[0]
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in SUMMED}
    return Stats(**sums, tiers=total_tiers(one.tiers for one in each))
