"""/openapi.json: true to what the server does. schemathesis makes requests from it, valid and not, and checks every answer against it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from fake import FakeClient
from hypothesis import HealthCheck, given, settings

from conftest import Running, running
from windlass.serve.app import make_app
from windlass.serve.openapi import openapi
from windlass.serve.routes_table import ROUTES
from windlass.serve.settings import Settings

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.pure

from schemathesis import checks  # noqa: E402

EXAMPLES = 40
"""Requests per route, besides those that schemathesis always makes."""
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
def server() -> Generator[Running]:
    with running(lambda: FakeClient(tokens=3), api_keys=(KEY,), head_seconds=60.0) as found:
        yield found


OPERATIONS = [
    found.ok()
    for found in schemathesis.openapi.from_dict(openapi(has_keys=True)).get_all_operations()
    if found.ok().path != "/windlass/live"  # which does not end
]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_answer_is_as_described(server: Running, operation: Any, mode: Any) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    def ask(case: Any) -> None:
        case.call_and_validate(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, checks=CHECKS, timeout=30)

    if operation.body or operation.path_parameters or mode is schemathesis.GenerationMode.POSITIVE:
        ask()


def test_nothing_was_left_behind(server: Running) -> None:
    server.until(lambda: len(server.service.flights) == 0)
    outcomes = server.service.metrics.outcomes
    assert outcomes["error"] == outcomes["unavailable"] == 0 and outcomes.total() > 2 * EXAMPLES


def test_every_route_is_described_and_every_description_is_a_route() -> None:
    app = make_app(FakeClient(), Settings())
    there = {
        (route.path.replace("{model:path}", "{model}"), method.lower())  # type: ignore[attr-defined]
        for route in app.router.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        if route.path not in ("/", "/page/{folder}/{name}")  # type: ignore[attr-defined]
    }
    assert there == {(route.path, route.method) for route in ROUTES}


def test_only_health_is_described_as_open() -> None:
    found = openapi(has_keys=True)
    free = [path for path, methods in found["paths"].items() for operation in methods.values() if operation.get("security") == []]
    assert free == ["/health"] and found["security"] == [{"key": []}]
