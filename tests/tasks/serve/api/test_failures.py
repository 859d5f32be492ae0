"""What no one expected while a request is handled: one line in the log, and an error in the API's format under the same id."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fake import FakeClient
from serving import HELLO, Lines, post, running

from windlass.core.client import Broken
from windlass.core.request import Delta, Request

pytestmark = pytest.mark.pure


class PanicException(BaseException):
    pass


class Failing(FakeClient):
    error: BaseException = PanicException("called `Option::unwrap()` on a `None` value\nsecret prompt")

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        raise self.error
        yield


class FailingOtherwise(Failing):
    error = KeyError("secret prompt")


@pytest.mark.parametrize("client", [Failing, FailingOtherwise])
@pytest.mark.parametrize(
    "more", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}], ids=["one", "stream", "two", "streams"]
)
def test_a_failure_is_a_logged_error_with_an_id(client: type[Failing], more: dict[str, Any]) -> None:
    with running(client) as server:
        answer = post(f"{server.url}/v1/chat/completions", json={**HELLO, **more})
        named = answer.headers["x-request-id"]
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["code"] == "internal" and named in error["message"]
        lines = [line for line in logged(server.log) if named in line]
        assert len(lines) == 1
        assert type(client.error).__name__ in lines[0] and "test_failures.py" in lines[0] and "secret" not in lines[0]
        assert not any("Traceback" in line for line in logged(server.log))
        assert server.is_running


class Broke(FakeClient):
    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        raise Broken("a library failed: /secret")
        yield

    async def tokenize(self, text: Any, owner: str = "") -> list[int]:
        raise Broken("a library failed: /secret")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages/count_tokens"])
def test_a_request_that_breaks_is_logged_under_the_id_that_its_client_is_told(path: str) -> None:
    with running(Broke) as server:
        answer = post(f"{server.url}{path}", json={**HELLO, "model": "fake"}, headers={"x-request-id": "a/mine"})
        assert answer.status_code == 500 and answer.headers["x-request-id"] == "a/mine"
        assert "a/mine" in json.dumps(answer.json())
        [line] = [line for line in logged(server.log) if "Broken" in line]
        assert line.startswith("a/mine: ") and "a library failed" in line


@pytest.mark.parametrize(("path", "more"), [("/v1/messages", {"max_tokens": 4}), ("/api/chat", {"stream": False})])
def test_other_apis_have_their_own_format(path: str, more: dict[str, Any]) -> None:
    with running(Failing) as server:
        answer = post(f"{server.url}{path}", json={**HELLO, **more, "model": "fake"}, headers={"x-request-id": "mine"})
        assert answer.status_code == 500
        assert "mine" in json.dumps(answer.json())


def test_a_constraint_that_nobody_thought_of_is_the_clients_fault_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(root: object) -> None:
        raise TypeError("secret")

    monkeypatch.setattr("windlass.model.text.grammar.schema._Reduction", fail)
    format = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "title": "secret of test_failures"}}}
    with running(FakeClient) as server:
        answer = post(f"{server.url}/v1/chat/completions", json={**HELLO, "response_format": format})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
        [line] = [line for line in logged(server.log) if "a look at a constraint failed" in line]
        assert "TypeError in test_failures.py" in line and "secret" not in line


def logged(log: Lines) -> list[str]:
    return list(log.lines)
