"""/openapi.json: true to what the server does. schemathesis makes requests from it, valid and not, and checks every answer against it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import pytest
from fake import FakeClient
from hypothesis import HealthCheck, given, settings
from serving import Running, running

from waiting import HUNG_SECONDS
from windlass.tasks.serve.app import make_app
from windlass.tasks.serve.routing.openapi import openapi
from windlass.tasks.serve.routing.routes import ROUTES
from windlass.tasks.serve.settings import ServerSettings
from windlass.wire.schema.chat import ChatChunk
from windlass.wire.schema.completions import CompletionResponse
from windlass.wire.schema.errors import ErrorBody

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.pure

from schemathesis import checks  # noqa: E402

EXAMPLES = settings().max_examples // 3
"""Requests per route, besides those that schemathesis always makes: eight, and many more with `make long`."""
CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.ignored_auth,
)
"""Not that every body of the right form is taken: a schema cannot say that a prompt fits, or that two wishes go together."""
KEY = "alpha"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Running]:
    folder = str(tmp_path_factory.mktemp("files"))
    with running(lambda: FakeClient(tokens=3), api_keys=(KEY,), head_seconds=60.0, files_folder=folder) as found:
        yield found


OPERATIONS = [
    found.ok()
    for found in schemathesis.openapi.from_dict(openapi(ROUTES, has_keys=True)).get_all_operations()
    if found.ok().path != "/windlass/live"  # which does not end
]


def check_events(answer: Any) -> None:
    """schemathesis does not look into the data of events."""
    if "text/event-stream" not in answer.headers["content-type"][0] or not answer.content:
        return
    if b"event: " in answer.content:  # of APIs whose events have names (test_other_apis.py)
        return
    events = [line.removeprefix(b"data: ") for line in answer.content.split(b"\n\n") if line]
    kind = ChatChunk if b"chat.completion.chunk" in answer.content else CompletionResponse
    for data in events[:-1]:
        msgspec.json.decode(data, type=kind)
    assert events[-1] == b"[DONE]" or msgspec.json.decode(events[-1], type=ErrorBody)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [route for route in ROUTES if route.request], ids=lambda route: route.path)
def test_the_examples_work(server: Running, route: Any, stream: bool) -> None:
    """What is shown to people as an example is answered, and as described."""
    operation = next(operation for operation in OPERATIONS if operation.path == route.path)
    for body in route.examples.values():
        asked = {**body, "stream": stream} if stream and "stream" in route.request.__struct_fields__ else body
        asked = asked if stream else {name: value for name, value in asked.items() if name not in ("stream", "stream_options")}
        case = operation.Case(body=asked, media_type="application/json")
        answer = case.call(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200
        case.validate_response(answer, checks=CHECKS[:5])
        check_events(answer)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_answer_is_as_described(server: Running, operation: Any, mode: Any) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES if operation.body else 5, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    def ask(case: Any) -> None:
        answer = case.call(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=HUNG_SECONDS)
        case.validate_response(answer, checks=CHECKS)
        check_events(answer)

    if operation.body or mode is schemathesis.GenerationMode.POSITIVE:
        ask()


def test_nothing_was_left_behind(server: Running) -> None:
    server.until(lambda: len(server.service.in_flight) == 0)
    outcomes = server.service.metrics.outcomes
    assert outcomes["error"] == outcomes["unavailable"] == 0 and server.service.body_reader.buffered_bytes == 0


def test_every_route_is_described_and_every_description_is_a_route() -> None:
    app = make_app(FakeClient(), ServerSettings())
    there = {
        (route.path.replace("{model:path}", "{model}"), method.lower())  # type: ignore[attr-defined]
        for route in app.router.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        if route.path != "/" and not route.path.startswith("/page/")  # type: ignore[attr-defined]
    }
    described = openapi(ROUTES, has_keys=False)["paths"]
    assert there == {(path, method) for path, methods in described.items() for method in methods}


def test_only_health_is_described_as_open() -> None:
    found = openapi(ROUTES, has_keys=True)
    free = [path for path, methods in found["paths"].items() for operation in methods.values() if operation.get("security") == []]
    assert free == ["/health"] and found["security"] == [{"key": []}]


def test_bounds_are_in_the_schema() -> None:
    fields = openapi(ROUTES, has_keys=False)["components"]["schemas"]["ChatRequest"]["properties"]

    def bounds(name: str) -> dict[str, Any]:
        [number] = [kind for kind in fields[name]["anyOf"] if kind.get("type") in ("integer", "number")]
        return {word: value for word, value in number.items() if word != "type"}

    assert bounds("max_tokens") == bounds("max_completion_tokens") == {"minimum": 0, "maximum": 2**31 - 1}
    assert bounds("top_k") == {"minimum": -1, "maximum": 2**31 - 1}
    assert bounds("temperature") == {"minimum": 0, "maximum": 100}
    assert bounds("repetition_penalty") == {"minimum": 0.01, "maximum": 100}
    assert bounds("top_p") == {"exclusiveMinimum": 0, "maximum": 1}
