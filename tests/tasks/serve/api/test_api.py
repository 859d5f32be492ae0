"""The API as raw HTTP sees it, over a scripted engine, without a socket."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fake import CONTEXT, FakeClient
from serving import HELLO, in_process, posted

from windlass.core.client import Broken, Busy, Unavailable
from windlass.core.request import ADDRESS, Delta, Embedding, EmbedRequest, Request, ScoreRequest, Scores
from windlass.errors import BadInput
from windlass.tasks.serve.api.adapters import Caller, GenerationJob, chat_job
from windlass.tasks.serve.api.generate import GenerateEndpoint
from windlass.tasks.serve.backend.admission import DEFAULT_SECONDS
from windlass.tasks.serve.http.body_reader import LARGE_BYTES
from windlass.tasks.serve.service import Service

pytestmark = pytest.mark.pure

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def events(text: str) -> list[Any]:
    """The data of a stream's events; `[DONE]` as it is."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [word if word == "[DONE]" else json.loads(word) for word in found]


def contents(chunks: list[Any], index: int = 0) -> str:
    pieces = (
        choice["delta"].get("content") or "" for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index
    )
    return "".join(pieces)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered() -> None:
    answer = posted(CHAT, {**HELLO, "model": "fake", "max_tokens": 3}).json()
    assert answer["object"] == "chat.completion" and answer["model"] == "fake" and answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "w0 w1 w2 " and choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len("<user>Hello") and answer["usage"]["completion_tokens"] == 3


def test_a_streamed_chat_says_the_same() -> None:
    response = posted(CHAT, {**HELLO, "stream": True, "max_tokens": 3})
    assert response.headers["content-type"] == "text/event-stream"
    found = events(response.text)
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert contents(found) == "w0 w1 w2 "
    assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in found[:-1]}) == 1


def test_usage_comes_last_where_it_is_asked_for() -> None:
    found = events(posted(CHAT, {**HELLO, "stream": True, "stream_options": {"include_usage": True}}).text)
    assert all(chunk["usage"] is None for chunk in found[:-2])
    assert found[-2]["choices"] == [] and found[-2]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_are_told_apart_by_their_index(stream: bool) -> None:
    body = {**HELLO, "n": 3, "stream": stream, "max_tokens": 5}
    response = posted(CHAT, body, FakeClient(seconds=0.001))
    if stream:
        found = events(response.text)
        assert [contents(found, index) for index in range(3)] == ["w0 w1 w2 w3 w4 "] * 3
        ends = [choice["index"] for chunk in found[:-1] for choice in chunk["choices"] if choice["finish_reason"]]
        assert sorted(ends) == [0, 1, 2]
    else:
        answer = response.json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == 15 and answer["usage"]["prompt_tokens"] == len("<user>Hello")


def test_seeds_of_several_answers_differ() -> None:
    client = FakeClient()
    posted(CHAT, {**HELLO, "n": 3, "seed": 7}, client)
    assert [request.sampling.seed for request in client.requests] == [7, 8, 9]


def test_what_is_asked_reaches_the_engine() -> None:
    client = FakeClient()
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "seed": 3,
        "repetition_penalty": 1.1, "stop": ["a", "b"], "logit_bias": {"5": -100}, "max_completion_tokens": 4, "timeout": 9,
        "stop_token_ids": [1], "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    answer = posted(CHAT, {**HELLO, **asked}, client).json()
    [request] = client.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 0.9, 5, 0.1, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert sampling.logit_bias == {5: -100} and request.stop == ("a", "b") and request.max_tokens == 4
    assert request.deadline_seconds == 9 and request.stop_token_ids == (1,) and request.ignore_eos
    assert answer["choices"][0]["message"]["reasoning_content"] == "w0 w1 "


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(stream: bool) -> None:
    body = {**HELLO, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "stream": stream}
    response = posted(CHAT, body)
    if stream:
        chunks = events(response.text)
        [call] = [call for chunk in chunks[:-1] for c in chunk["choices"] for call in c["delta"].get("tool_calls") or ()]
        assert call["index"] == 0
        reason = chunks[-2]["choices"][0]["finish_reason"]
    else:
        [choice] = response.json()["choices"]
        [call], reason = choice["message"]["tool_calls"], choice["finish_reason"]
        assert choice["message"]["content"] is None
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("asked", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            "json_schema",
            '{"type":"object"}',
        ),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", '["yes","no"]'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ],
)
def test_an_answers_form_becomes_a_constraint(asked: dict[str, Any], kind: str, value: str) -> None:
    client = FakeClient()
    assert posted(CHAT, {**HELLO, **asked}, client).status_code == 200
    constraint = client.requests[0].constraint
    assert constraint is not None and (constraint.kind, constraint.value) == (kind, value)


def test_a_chats_logprobs() -> None:
    answer = posted(CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["w0 ", "w1 "]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]


# --- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "num"), [("abc", 1), (["abc", "de"], 2), ([97, 98], 1), ([[97], [98, 99]], 2)])
def test_a_prompt_is_a_text_or_tokens_or_several(prompt: Any, num: int) -> None:
    answer = posted(TEXT, {"prompt": prompt, "max_tokens": 2, "n": 2}).json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num))
    assert all(choice["text"] == "w0 w1 " for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4 * num


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_logprobs_score_a_text(prompt: Any, stream: bool) -> None:
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    response = posted(TEXT, body)
    [choice] = response.json()["choices"] if not stream else events(response.text)[0]["choices"]
    assert choice["text"] == "abc"
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "b", "c"] and found["text_offset"] == [0, 1, 2]
    assert found["token_logprobs"][0] is None and found["token_logprobs"][1:] == [-0.5, -0.5]


def test_echo_without_logprobs_is_only_text() -> None:
    [choice] = posted(TEXT, {"prompt": "abc", "max_tokens": 1, "echo": True}).json()["choices"]
    assert choice["text"] == "abcw0 " and choice["logprobs"] is None


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (CHAT, b"", 400, None, "invalid_json"),
        (CHAT, b"{", 400, None, "invalid_json"),
        (CHAT, b"[]", 400, None, None),
        (CHAT, b"\xff\xfe", 400, None, "invalid_json"),
        (CHAT, b"[" * 100_000, 400, None, None),
        (CHAT, {}, 400, "messages", "missing_required_parameter"),
        (CHAT, {"messages": []}, 400, "messages", None),
        (CHAT, {**HELLO, "model": "other"}, 404, "model", "model_not_found"),
        (CHAT, {**HELLO, "temperatur": 1}, 400, "temperatur", "unknown_parameter"),
        (CHAT, {**HELLO, "temperature": "hot"}, 400, "temperature", None),
        (CHAT, {**HELLO, "temperature": -1}, 400, "temperature", None),
        (CHAT, {**HELLO, "n": 17}, 400, "n", None),
        (CHAT, {**HELLO, "n": 0}, 400, "n", None),
        (CHAT, {**HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias", None),
        (CHAT, {**HELLO, "stream_options": {"include_usage": True}}, 400, "stream_options", None),
        (CHAT, {**HELLO, "audio": {}}, 400, "audio", "unsupported_parameter"),
        (CHAT, {**HELLO, "timeout": 601}, 400, "timeout", None),
        (CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, 400, "messages", "context_length_exceeded"),
        (CHAT, {**HELLO, "max_tokens": CONTEXT}, 400, "messages", "context_length_exceeded"),
        (TEXT, {"prompt": "x" * (CONTEXT + 1)}, 400, "prompt", "context_length_exceeded"),
        (TEXT, {"prompt": ["x"] * 65}, 400, "prompt", None),
        (TEXT, {"prompt": ["x"] * 64, "n": 2}, 400, "n", None),
        (TEXT, {"prompt": "x", "best_of": 3}, 400, "best_of", None),
        (TEXT, {"prompt": "x", "suffix": "y"}, 400, "suffix", None),
        (TEXT, {"prompt": ["x"] * 40, "n": 2}, 400, "n", None),
        (TEXT, {"prompt": ""}, 400, "prompt", None),
        (TEXT, {"prompt": [10**30]}, 400, "prompt[0]", "invalid_value"),
        (CHAT, {**HELLO, "max_tokens": 10**30}, 400, "max_tokens", "invalid_value"),
        (CHAT, {**HELLO, "logit_bias": {str(10**30): 1}}, 400, "logit_bias", "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * (CONTEXT + 1)}, 400, "messages", "context_length_exceeded"),
        (TEXT, {"prompt": [1] * (CONTEXT + 1)}, 400, "prompt", "context_length_exceeded"),
        ("/tokenize", {}, 400, "prompt", None),
        ("/detokenize", {"tokens": [999999]}, 400, "tokens[0]", None),
        ("/detokenize", {"tokens": [-1]}, 400, None, None),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_name(path: str, body: Any, status: int, param: str | None, code: str | None) -> None:
    response = posted(path, body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["message"] and error["type"]
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code


def test_unknown_routes_and_methods() -> None:
    async def ask() -> None:
        async with in_process(FakeClient()) as (http, _):
            assert (await http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
            response = await http.get(CHAT)
            assert response.status_code == 405 and "POST" in response.headers["allow"]
            assert response.json()["error"]["code"] == "method_not_allowed"
            assert (await http.get("/v1/models/other")).status_code == 404
            assert (await http.get("/v1/models/fake")).json()["id"] == "fake"

    asyncio.run(ask())


def test_tokens_there_and_back() -> None:
    async def ask() -> None:
        async with in_process(FakeClient()) as (http, _):
            found = (await http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})).json()
            assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 6 and found["max_model_len"] == CONTEXT
            assert (await http.post("/detokenize", json={"tokens": found["tokens"]})).json() == {"prompt": "héllo"}
            chat = (await http.post("/tokenize", json=HELLO)).json()
            assert bytes(chat["tokens"]).decode() == "<user>Hello"

    asyncio.run(ask())


class Failing(FakeClient):
    """Whose answers, or tokens, break."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        raise self._error
        yield Delta()

    async def tokenize(self, text: Any, owner: str = "") -> list[int]:
        raise self._error


def test_an_answer_that_breaks_is_not_told_as_an_engine_that_is_gone() -> None:
    async def ask() -> None:
        async with in_process(Failing(Broken("the logits are not numbers"))) as (http, service):
            answer = await http.post(CHAT, json=HELLO)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "answer_failed")
            assert "anew" not in answer.text and "retry-after" not in answer.headers
            assert service.supervisor.restarts == 0 and service.metrics.outcomes == {"error": 1}
            assert any("not numbers" in line for line in service.log.lines)  # type: ignore[attr-defined]

    asyncio.run(ask())


def test_an_engine_that_has_too_much_to_do_is_not_taken_to_be_gone() -> None:
    async def ask() -> None:
        async with in_process(Failing(Busy("too many grammars are being compiled"))) as (http, service):
            answer = await http.post(CHAT, json=HELLO)
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
            assert service.supervisor.restarts == 0 and service.metrics.outcomes == {"full": 1}

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_form_that_cannot_be_followed_is_blamed_on_who_asked_for_it(asked: dict[str, Any], param: str) -> None:
    response = posted(CHAT, {**HELLO, **asked}, Failing(BadInput("the grammar could not be followed", field="constraint")))
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_tokens_of_an_engine_that_is_gone_say_when_to_come_again() -> None:
    response = posted("/tokenize", {"prompt": "x"}, Failing(Unavailable("ended: /secret")))
    assert response.status_code == 503 and "retry-after" in response.headers and "secret" not in response.text


def test_tokens_are_for_those_who_are_let_in() -> None:
    async def ask() -> None:
        async with in_process(FakeClient(slots=1), max_waiting=0) as (http, service):
            bodies = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}
            for path, body in bodies.items():
                assert (await http.post(path, json=body)).status_code == 200
            mean_seconds = service.in_flight.mean_seconds
            with service.admitted(1):
                for path, body in bodies.items():
                    answer = await http.post(path, json=body)
                    assert answer.status_code == 429 and "retry-after" in answer.headers
            assert service.in_flight.mean_seconds != mean_seconds == DEFAULT_SECONDS  # only answers say how long answers take
            assert service.in_flight.num_sequences == 0

    asyncio.run(ask())


def test_a_prompt_that_is_echoed_is_not_cut_into_tokens_before_it_is_let_in() -> None:
    async def ask() -> None:
        client = Counting(slots=1)
        async with in_process(client, max_waiting=0) as (http, service):
            body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
            with service.admitted(1):
                assert (await http.post(TEXT, json=body)).status_code == 429
                assert client.num_tokenized == 0
            assert (await http.post(TEXT, json=body)).status_code == 200
            assert client.num_tokenized == 1

    asyncio.run(ask())


class Counting(FakeClient):
    num_tokenized = 0

    async def tokenize(self, text: Any, owner: str = "") -> list[int]:
        self.num_tokenized += 1
        return await super().tokenize(text)


def test_a_large_body_is_read_aside() -> None:
    threads: list[bool] = []

    def noted(service: Service, raw: bytes, caller: Caller) -> GenerationJob:
        threads.append(threading.current_thread() is threading.main_thread())
        return chat_job(service, raw, caller)

    async def ask() -> None:
        async with in_process(FakeClient()) as (_, service):
            app = GenerateEndpoint(service, noted)
            for size in (10, LARGE_BYTES):
                body = json.dumps({**HELLO, "metadata": {"x": " " * size}}).encode()
                sent: list[Any] = []
                messages = [{"type": "http.request", "body": body}]

                async def receive(left: list[Any] = messages) -> Any:
                    return left.pop() if left else await asyncio.Event().wait()

                async def send(message: Any, sent: list[Any] = sent) -> None:
                    sent.append(message)

                await app({"type": "http", "headers": []}, receive, send)
                assert sent[0]["status"] == 200

    asyncio.run(ask())
    assert threads == [True, False]


class Ticking(FakeClient):
    """Notes at which of the event loop's turns it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.turns = 0, set[int]()

    async def tick(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    async def detokenize(self, token_ids: Any) -> str:
        self.turns.add(self.turn)
        return await super().detokenize(token_ids)


def test_many_tokens_as_texts_leave_others_their_turn() -> None:
    async def ask() -> None:
        client = Ticking()
        async with in_process(client) as (http, _):
            ticking = asyncio.create_task(client.tick())
            answer = await http.post("/tokenize", json={"prompt": "x" * 50_000, "return_token_strs": True})
            ticking.cancel()
            assert len(answer.json()["token_strs"]) == 50_000
            assert len(client.turns) > 100

    asyncio.run(ask())


# --- keys, names, pages ----------------------------------------------------------------------------------------------

ROUTES = ("/v1/models", "/ready", "/metrics", "/windlass/status", "/openapi.json", "/v1/models/fake", "/nothing")


def test_every_route_but_health_needs_the_key() -> None:
    async def ask() -> None:
        async with in_process(FakeClient(), api_keys=("alpha", "beta")) as (http, service):
            assert (await http.get("/health")).status_code == 200
            for route in ROUTES:
                refused = await http.get(route)
                assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert (await http.get(route, headers={"authorization": "Bearer gamma"})).status_code == 401
            for route in (CHAT, TEXT, "/tokenize", "/detokenize"):
                assert (await http.post(route, json=HELLO)).status_code == 401
            for key in ("alpha", "beta"):
                headers = {"authorization": f"Bearer {key}"}
                assert (await http.get("/v1/models", headers=headers)).status_code == 200
                assert (await http.post(CHAT, json=HELLO, headers=headers)).status_code == 200
            first, second = service.client.requests  # type: ignore[attr-defined]
            assert first.owner != second.owner and first.cache_salt != second.cache_salt
            assert not any("alpha" in line or "Hello" in line for line in service.log.lines)  # type: ignore[attr-defined]

    asyncio.run(ask())


class Noting(FakeClient):
    """Whose requests they are."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[str] = []
        self.deadlines: list[float | None] = []

    async def tokenize(self, text: Any, owner: str = "") -> list[int]:
        self.owners.append(owner)
        return await super().tokenize(text)

    async def score(self, request: ScoreRequest) -> Scores:
        self.owners.append(request.owner)
        self.deadlines.append(request.deadline_seconds)
        return await super().score(request)

    async def embed(self, request: EmbedRequest) -> Embedding:
        self.owners.append(request.owner)
        self.deadlines.append(request.deadline_seconds)
        return await super().embed(request)


@pytest.mark.parametrize(("keys", "group"), [((), f"{ADDRESS}127.0.0.1/"), (("alpha", "beta"), "2/")])
def test_every_request_says_whose_it_is(keys: tuple[str, ...], group: str) -> None:
    async def ask() -> None:
        client = Noting()
        async with in_process(client, api_keys=keys, deadline_seconds=77.0) as (http, _):
            bodies = {
                "/tokenize": HELLO,
                "/v1/messages/count_tokens": {**HELLO, "model": "fake"},
                "/v1/embeddings": {"input": "x"},
                CHAT: HELLO,
            }
            for path, body in bodies.items():
                assert (await http.post(path, json=body, headers={"authorization": "Bearer beta"})).status_code == 200
            assert client.deadlines == [77.0]
            owners = [*client.owners, client.requests[0].owner]
            assert len(owners) == 4 and all(owner.startswith(group) for owner in owners), owners
            rerank = {"query": "q", "documents": ["d"]}
            assert (await http.post("/v1/rerank", json=rerank, headers={"authorization": "Bearer beta"})).status_code == 200
            assert client.owners[-1].startswith(group) and client.deadlines == [77.0, 77.0]

    asyncio.run(ask())


def test_the_page_loads_without_a_key_and_its_numbers_do_not() -> None:
    async def ask() -> None:
        async with in_process(FakeClient(), api_keys=("alpha",)) as (http, _):
            assert (await http.get("/")).status_code == 200
            assert (await http.get("/windlass/status")).status_code == 401

    asyncio.run(ask())


def test_other_names_and_other_sites_are_refused() -> None:
    async def ask() -> None:
        async with in_process(FakeClient()) as (http, _):
            assert (await http.get("/v1/models", headers={"host": "evil.example"})).status_code == 403
            assert (await http.get("/health", headers={"host": "evil.example"})).status_code == 403
            foreign = await http.post(CHAT, json=HELLO, headers={"origin": "https://evil.example"})
            assert foreign.status_code == 403 and "access-control-allow-origin" not in foreign.headers
            assert (await http.post(CHAT, json=HELLO, headers={"origin": "http://localhost"})).status_code == 200
        async with in_process(FakeClient(), cors_origins=("https://app.example",), api_keys=("alpha",)) as (http, _):
            headers = {"origin": "https://app.example"}
            asked = {**headers, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
            preflight = await http.options(CHAT, headers=asked)
            assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == "https://app.example"
            stainless = {
                **asked,
                "access-control-request-headers": "authorization,content-type,x-stainless-arch,x-stainless-lang",
            }
            preflight = await http.options(CHAT, headers=stainless)
            assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
            answer = await http.post(CHAT, json=HELLO, headers={**headers, "authorization": "Bearer alpha"})
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://app.example"

    asyncio.run(ask())


def test_neither_prompts_nor_made_up_paths_are_logged_unless_asked_for() -> None:
    async def ask(log_prompts: bool) -> list[str]:
        async with in_process(FakeClient(), log_prompts=log_prompts) as (http, service):
            await http.post(CHAT, json=HELLO)
            await http.get("/Hello/secret")
            await http.post(CHAT, json={**HELLO, "Hello": 1})
            return service.log.lines  # type: ignore[attr-defined]

    assert not any("Hello" in line for line in asyncio.run(ask(False)))
    assert any("Hello" in line for line in asyncio.run(ask(True)))


def test_a_quiet_server_writes_no_line_for_requests_and_still_tells_of_the_engine() -> None:
    async def ask() -> list[str]:
        async with in_process(FakeClient(), log_requests=False) as (http, service):
            await http.post(CHAT, json=HELLO)
            return service.log.lines  # type: ignore[attr-defined]

    assert asyncio.run(ask()) == ["engine ready"]


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_what_was_done_is_counted() -> None:
    async def ask() -> tuple[str, Any]:
        async with in_process(FakeClient()) as (http, _):
            await http.post(CHAT, json={**HELLO, "max_tokens": 4})
            await http.post(CHAT, json={**HELLO, "max_tokens": 5, "stream": True})
            await http.post(CHAT, json={**HELLO, "n": 99})
            return (await http.get("/metrics")).text, (await http.get("/windlass/status")).json()

    text, status = asyncio.run(ask())
    assert "windlass_generation_tokens_total 9.0" in text
    assert 'windlass_requests_total{outcome="length"} 2.0' in text and 'windlass_requests_total{outcome="refused"} 1.0' in text
    assert "windlass_time_to_first_token_seconds_count 2.0" in text and "windlass_inter_token_latency_seconds_count 7.0" in text
    assert 'windlass_http_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
    assert "# TYPE windlass_engine_restarts_total counter" in text and "# TYPE windlass_kv_cache_usage_ratio gauge" in text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "request_queue_time_seconds_count"):
        assert f"windlass_{name}" in text
    assert status["totals"] == {
        "requests": 3, "prompt_tokens": 22, "completion_tokens": 9, "by_outcome": {"length": 2, "refused": 1},
    }  # fmt: skip
    assert status["state"] == "ready" and status["now"]["ttft_p50"] > 0 and status["machine"]["process_bytes"] > 0


def test_live_numbers_come_as_events_until_the_server_ends() -> None:
    async def ask() -> list[Any]:
        async with in_process(FakeClient()) as (http, service):
            asyncio.get_running_loop().call_later(0.1, service.draining.set)
            return events((await http.get("/windlass/live")).text)

    found = asyncio.run(ask())
    assert [status["state"] for status in found] == ["ready", "draining"]


def test_every_number_is_documented_and_every_documented_number_is_there() -> None:
    async def ask() -> str:
        async with in_process(FakeClient()) as (http, _):
            return (await http.get("/metrics")).text

    there = set(re.findall(r"^# TYPE (windlass_\w+) (?:counter|gauge|histogram)$", asyncio.run(ask()), re.MULTILINE))
    page = (Path(__file__).parents[4] / "docs" / "reference" / "serve.md").read_text()
    table = page[page.index("| metric | kind |") :]
    assert {name for name in there if not name.endswith("_created")} == set(
        re.findall(r"`(windlass_\w+?)(?:\{|`)", table.split("\n\n")[0])
    )


# --- keys with names -------------------------------------------------------------------------------------------------


def test_a_user_may_not_do_what_an_admin_may() -> None:
    from datetime import UTC, datetime

    from windlass.tasks.serve.api_key import ApiKey

    keys = (
        ApiKey(name="user", key="u", requests_per_minute=2),
        ApiKey(name="ops", key="o", role="admin"),
        ApiKey(name="old", key="x", expires=datetime(2020, 1, 1, tzinfo=UTC)),
    )

    async def ask() -> None:
        async with in_process(FakeClient(), api_keys=keys) as (http, _):

            async def status(path: str, key: str) -> int:
                return (await http.get(path, headers={"x-api-key": key})).status_code

            assert [await status("/metrics", key) for key in "uox"] == [403, 200, 401]
            assert [await status("/windlass/status", key) for key in "uo"] == [403, 200]
            assert [await status("/v1/models", key) for key in "uox"] == [200, 200, 401]
            answers = [await http.post(CHAT, json=HELLO, headers={"x-api-key": "u"}) for _ in range(3)]
            assert [answer.status_code for answer in answers] == [200, 200, 429]
            assert "requests_per_minute" in answers[-1].json()["error"]["message"] and answers[-1].headers["retry-after"]
            assert (await http.post(CHAT, json=HELLO, headers={"x-api-key": "o"})).status_code == 200
            text = (await http.get("/metrics", headers={"x-api-key": "o"})).text
            assert 'windlass_key_requests_total{key="user"} 2.0' in text
            assert f'windlass_key_tokens_total{{key="user",kind="prompt"}} {2 * len("<user>Hello")}.0' in text

    asyncio.run(ask())


def test_one_key_cannot_shut_out_another() -> None:
    async def ask() -> None:
        client = FakeClient(slots=1, hold_after=1)
        async with in_process(client, api_keys=("alpha", "beta"), max_waiting=3) as (http, service):

            def post(key: str) -> asyncio.Task[Any]:
                return asyncio.create_task(http.post(CHAT, json=HELLO, headers={"Authorization": f"Bearer {key}"}))

            greedy = [post("alpha") for _ in range(8)]
            while service.in_flight.num_sequences < 4 or sum(task.done() for task in greedy) < 4:
                await asyncio.sleep(0.001)
            other = post("beta")
            while service.in_flight.by_share["2"] < 1:
                await asyncio.sleep(0.001)
                assert not other.done(), "refused although it had nothing in the queue"
            client.release()
            assert (await other).status_code == 200
            assert sorted([(await task).status_code for task in greedy]) == [200] * 4 + [429] * 4

    asyncio.run(ask())


def test_requests_are_named() -> None:
    async def ask() -> None:
        async with in_process(FakeClient()) as (http, _):
            given = await http.post(CHAT, json=HELLO, headers={"x-request-id": "mine"})
            assert given.headers["x-request-id"] == "mine" and given.json()["system_fingerprint"].startswith("fp_")
            made = await http.get("/nothing", headers={"x-request-id": "a b"})
            assert made.headers["x-request-id"].startswith("req_")

    asyncio.run(ask())


@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_that_cannot_be_enforced_is_named_or_refused(strict: bool) -> None:
    schema = {"type": "object", "properties": {"tags\r\nx-evil: 1": {"type": "array", "uniqueItems": True}}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    answer = posted(CHAT, {**HELLO, "response_format": format})
    if strict:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
    else:
        assert (
            answer.headers["windlass-unenforced"] == "properties.tags??x-evil:?1.uniqueItems" and "x-evil" not in answer.headers
        )
        assert answer.headers["windlass-schema"] == "valid"
