"""One span a request in OpenTelemetry's GenAI conventions, sent as OTLP over HTTP in JSON. Names and numbers only: never text of a prompt.

github.com/open-telemetry/semantic-conventions, gen-ai spans (in development); opentelemetry.io/docs/specs/otlp, JSON encoding. Spans wait in a
bounded queue and go out in batches from a thread; a collector that does not answer costs spans, not requests.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import msgspec

from windlass import __version__
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.wire.client.url import open_url

MAX_QUEUED = 2048
MAX_BATCH = 256
SECONDS = 2.0
TIMEOUT_SECONDS = 5.0
SERVER_KIND = 2
ERROR_STATUS = 2


class RequestSpan(Frozen):
    operation: str
    """`chat` or `text_completion`."""
    model: str
    began: float
    """Seconds since 1970."""
    seconds: float
    outcome: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float | None = None
    energy_joules: float | None = None


class TraceExporter:
    def __init__(self, endpoint: str) -> None:
        """`endpoint`: http://host:4318; the path /v1/traces is added if there is none."""
        if not endpoint.startswith(("http://", "https://")):
            raise BadInput(f"--otlp {endpoint}: give a URL, such as http://127.0.0.1:4318")
        base = endpoint.rstrip("/")
        self._url = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
        self._queue: queue.Queue[RequestSpan | None] = queue.Queue(MAX_QUEUED)
        self.num_sent = self.num_lost = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, span: RequestSpan) -> None:
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self.num_lost += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(TIMEOUT_SECONDS + 1)

    def _run(self) -> None:
        while True:
            batch, is_last = self._take()
            if batch:
                self._post(batch)
            if is_last:
                return

    def _take(self) -> tuple[list[RequestSpan], bool]:
        found = [self._queue.get()]
        until = time.monotonic() + SECONDS
        while found[-1] is not None and len(found) < MAX_BATCH and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                found.append(self._queue.get(timeout=0.2))
        return [span for span in found if span is not None], found[-1] is None

    def _post(self, batch: Sequence[RequestSpan]) -> None:
        body = msgspec.json.encode(spans_json(batch))
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            with open_url(request, TIMEOUT_SECONDS):
                self.num_sent += len(batch)
        except (OSError, ValueError):
            self.num_lost += len(batch)


# --- pure ------------------------------------------------------------------------------------------------------------


def spans_json(batch: Sequence[RequestSpan]) -> dict[str, Any]:
    resource = {"attributes": _attributes({"service.name": "windlass", "service.version": __version__})}
    scope = {"scope": {"name": "windlass.serve", "version": __version__}, "spans": [span_json(span) for span in batch]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def span_json(span: RequestSpan) -> dict[str, Any]:
    failed = {"code": ERROR_STATUS, "message": span.outcome} if span.outcome in ("error", "unavailable", "late") else {}
    return {
        "traceId": os.urandom(16).hex(),
        "spanId": os.urandom(8).hex(),
        "name": f"{span.operation} {span.model}",
        "kind": SERVER_KIND,
        "startTimeUnixNano": str(int(span.began * 1e9)),
        "endTimeUnixNano": str(int((span.began + span.seconds) * 1e9)),
        "attributes": _attributes(_named(span)),
        "status": failed,
    }


def _named(span: RequestSpan) -> dict[str, str | int | float | None]:
    return {
        "gen_ai.operation.name": span.operation,
        "gen_ai.provider.name": "windlass",
        "gen_ai.request.model": span.model,
        "gen_ai.response.model": span.model,
        "gen_ai.usage.input_tokens": span.prompt_tokens,
        "gen_ai.usage.output_tokens": span.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": span.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": span.reasoning_tokens,
        "windlass.outcome": span.outcome,
        "windlass.queue_seconds": span.queue_seconds,
        "windlass.prefill_seconds": span.prefill_seconds,
        "windlass.decode_seconds": span.decode_seconds,
        "windlass.time_to_first_token_seconds": span.first_token_seconds,
        "windlass.energy_joules": span.energy_joules,
    }


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: str | int | float) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"doubleValue": value} if isinstance(value, float) else {"intValue": str(value)}
