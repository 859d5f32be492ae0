"""A server that is watched: requests listed and cancelled, history, aliases, energy in usage, spans; and no text of a prompt anywhere."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fake import FakeClient
from hypothesis import given
from hypothesis import strategies as st
from serving import HELLO, in_process

from waiting import until
from windlass.core.metrics.watched import Watched
from windlass.errors import BadInput
from windlass.tasks.serve.monitor.energy import RequestEnergy
from windlass.tasks.serve.monitor.metrics import Metrics
from windlass.tasks.serve.monitor.traces import RequestSpan, TraceExporter, span_json
from windlass.tasks.serve.service import Service

pytestmark = pytest.mark.pure
SECRET = "a prompt that nobody may see"


async def _until(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


def test_requests_are_listed_and_cancelled() -> None:
    async def work() -> None:
        client = FakeClient(hold_after=2)
        async with in_process(client) as (http, service):
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=HELLO))
            await _until(lambda: any(one.num_tokens == 2 for one in service.in_flight.requests))
            (row,) = (await http.get("/windlass/requests")).json()["requests"]
            assert row["state"] == "running" and row["tokens"] == 2 and row["age_seconds"] >= 0
            assert (await http.delete("/windlass/requests/999")).status_code == 404
            assert (await http.delete("/windlass/requests/no")).status_code == 404
            assert (await http.delete(f"/windlass/requests/{row['number']}")).json() == {"number": row["number"]}
            answer = await asking
            assert answer.status_code == 409 and "operator" in answer.json()["error"]["message"]
            assert (await http.get("/windlass/requests")).json() == {"requests": []}

    asyncio.run(work())


def test_a_users_key_may_not_cancel() -> None:
    from windlass.tasks.serve.api_key import ApiKey

    async def work() -> None:
        keys = (ApiKey(key="user-secret-key", name="user", role="user"),)
        async with in_process(FakeClient(), api_keys=keys) as (http, _):
            for method, path in (("GET", "/windlass/requests"), ("DELETE", "/windlass/requests/1"), ("GET", "/windlass/history")):
                assert (await http.request(method, path)).status_code == 401
                headers = {"Authorization": "Bearer user-secret-key"}
                assert (await http.request(method, path, headers=headers)).status_code == 403

    asyncio.run(work())


class FakeWatch:
    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1

    def watched(self) -> Watched:
        return Watched(now=1.0, alerts=[], recent=[], charts=[], left_out=[])

    def close(self) -> None:
        pass


def test_history_is_there_only_if_something_watches() -> None:
    async def work() -> None:
        async with in_process(FakeClient()) as (http, service):
            assert (await http.get("/windlass/history")).status_code == 404
            service.watch = FakeWatch()
            assert (await http.get("/windlass/history")).json()["alerts"] == []

    asyncio.run(work())


@pytest.mark.parametrize("aliases", [True, False])
def test_vllms_names_are_there_and_can_be_turned_off(aliases: bool) -> None:
    async def work() -> str:
        async with in_process(FakeClient(), metric_aliases=aliases, model="some-model") as (http, _):
            await http.post("/v1/chat/completions", json=HELLO)
            return (await http.get("/metrics")).text

    text = asyncio.run(work())
    labels = 'engine="0",model_name="some-model"'
    for line in (
        f"vllm:num_requests_running{{{labels}}} 0.0", 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="some-model"} 1.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0", f"vllm:generation_tokens_total{{{labels}}} 8.0",
    ):  # fmt: skip
        assert (line in text.splitlines()) == aliases, text
    assert ("# TYPE vllm:e2e_request_latency_seconds histogram" in text) == aliases
    assert "windlass_num_requests_running 0.0" in text and "windlass_engine_up 1.0" in text


def test_clients_cannot_make_series() -> None:
    async def work() -> tuple[int, int]:
        async with in_process(FakeClient()) as (http, service):
            await http.post("/v1/chat/completions", json=HELLO)
            await http.get("/nothing")
            before = len(service.metrics.text().splitlines())
            for number in range(50):
                await http.post("/v1/chat/completions", json={**HELLO, "model": f"m{number}", "user": f"u{number}"})
                await http.get(f"/path/{number}")
                await http.get("/nothing", headers={"User-Agent": str(number)})
            return before, len(service.metrics.text().splitlines())

    before, after = asyncio.run(work())
    assert after - before <= 6  # the outcome `refused` and its HTTP status


class Counter:
    """A counter of energy: 200 W."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self) -> float:
        return 200 * (time.monotonic() - self._began)


def _counted(service: Service) -> None:
    service.energy = RequestEnergy(Counter(), lambda: False, service.all_in_flight)


@pytest.mark.parametrize("stream", [False, True])
def test_energy_in_usage(stream: bool) -> None:
    async def work() -> tuple[str, float]:
        async with in_process(FakeClient(seconds=0.02), usage_energy=True) as (http, service):
            _counted(service)
            body = {**HELLO, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
            text = (await http.post("/v1/chat/completions", json=body)).text
            return text, service.energy.ledger.joules["requests"]

    text, joules = asyncio.run(work())
    last = (
        json.loads(text)
        if not stream
        else json.loads([line for line in text.splitlines() if '"usage"' in line][-1].removeprefix("data: "))
    )
    assert last["usage"]["energy_joules"] == pytest.approx(joules, rel=0.05) and joules > 0


def test_energy_of_many_requests_adds_up_to_the_counter() -> None:
    async def work() -> tuple[float, float]:
        async with in_process(FakeClient(seconds=0.01, slots=3)) as (http, service):
            _counted(service)
            for _ in range(3):
                await asyncio.gather(*(http.post("/v1/chat/completions", json=HELLO) for _ in range(4)))
                await asyncio.sleep(0.02)
            service.energy.settle()
            ledger = service.energy.ledger
            assert sum(service.energy.by_model.values()) == pytest.approx(ledger.joules["requests"])
            return ledger.total_joules, float(service.energy._last or 0)

    attributed, counted = asyncio.run(work())
    assert attributed == pytest.approx(counted, rel=0.01)


# --- spans


class Collector:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def spans(self) -> list[dict[str, Any]]:
        return [
            span
            for body in self.bodies
            for one in body["resourceSpans"]
            for scope in one["scopeSpans"]
            for span in scope["spans"]
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def test_a_span_for_every_request_without_its_text() -> None:
    collector = Collector()

    async def work() -> None:
        async with in_process(FakeClient(), model="m") as (http, service):
            service.traces = TraceExporter(collector.url)
            secret = {"messages": [{"role": "user", "content": SECRET}]}
            await http.post("/v1/chat/completions", json=secret)
            await http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 4})

    asyncio.run(work())
    until(lambda: len(collector.spans()) == 2)
    collector.close()
    assert [span["name"] for span in collector.spans()] == ["chat m", "text_completion m"]
    first = {one["key"]: next(iter(one["value"].values())) for one in collector.spans()[0]["attributes"]}
    assert (
        first["gen_ai.operation.name"] == "chat"
        and first["gen_ai.usage.output_tokens"] == "8"
        and first["windlass.outcome"] == "stop"
    )
    assert SECRET not in json.dumps(collector.bodies) and int(collector.spans()[0]["endTimeUnixNano"]) > int(
        collector.spans()[0]["startTimeUnixNano"]
    )


def test_a_failed_request_is_an_error_span() -> None:
    made = span_json(RequestSpan(operation="chat", model="m", began=1.0, seconds=0.5, outcome="error"))
    assert made["status"] == {"code": 2, "message": "error"} and len(made["traceId"]) == 32 and len(made["spanId"]) == 16
    assert made["startTimeUnixNano"] == "1000000000" and made["endTimeUnixNano"] == "1500000000"


def test_a_collector_that_is_gone_costs_spans_only() -> None:
    exporter = TraceExporter("http://127.0.0.1:1")
    for _ in range(5):
        exporter.add(RequestSpan(operation="chat", model="m", began=1.0, seconds=0.5, outcome="stop"))
    exporter.close()
    assert exporter.num_lost == 5
    with pytest.raises(BadInput):
        TraceExporter("localhost:4318")


def test_no_text_of_prompts_in_metrics() -> None:
    async def work() -> str:
        async with in_process(FakeClient()) as (http, _):
            await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": SECRET}], "user": SECRET})
            return (await http.get("/metrics")).text + (await http.get("/windlass/requests")).text

    assert SECRET not in asyncio.run(work())


@given(st.lists(st.floats(0, 100), max_size=50))
def test_the_histogram_of_tokens_is_as_the_librarys(values: list[float]) -> None:
    """It is there for its speed alone."""
    from prometheus_client import CollectorRegistry, Histogram
    from prometheus_client.exposition import generate_latest

    from windlass.core.metrics.serving import INTER_TOKEN_LATENCY

    ours, registry = Metrics(), CollectorRegistry()
    theirs = Histogram(INTER_TOKEN_LATENCY.name, "", registry=registry, buckets=INTER_TOKEN_LATENCY.buckets)
    for value in (*values, *INTER_TOKEN_LATENCY.buckets):
        ours.inter_token.observe(value)
        theirs.observe(value)

    def samples(text: bytes) -> list[str]:
        return [
            line for line in text.decode().splitlines() if line.startswith(INTER_TOKEN_LATENCY.name) and "_created" not in line
        ]

    assert samples(ours.text()) == samples(generate_latest(registry))
