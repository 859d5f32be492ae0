"""The Responses, Messages and Ollama APIs as raw HTTP sees them: each is a chat in other words."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from typing import Any

import httpx
import pytest
from fake import FakeClient
from serving import HELLO, in_process, posted

from windlass.core.client import Unavailable
from windlass.core.request import Scores, TokenLogprob
from windlass.tasks.serve.backend.stored_responses import StoredResponses

pytestmark = pytest.mark.pure

RESPONSES, MESSAGES, CHAT, GENERATE = "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
USER = [{"role": "user", "content": "Hello"}]


def sse(text: str) -> list[dict[str, Any]]:
    """Events with a name and data that agree; `[DONE]` is left out."""
    found: list[dict[str, Any]] = []
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if len(lines) == 2:
            data = json.loads(lines[1].removeprefix("data: "))
            assert lines[0] == f"event: {data['type']}"
            found.append(data)
    return found


def asked(
    *requests: tuple[str, str, Any], client: FakeClient | None = None, key: str = "", **settings: Any
) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with in_process(client or FakeClient(), **settings) as (http, _):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return [await http.request(method, path, json=body, headers=headers) for method, path, body in requests]

    return asyncio.run(ask())


# --- responses -------------------------------------------------------------------------------------------------------


def test_a_response() -> None:
    client = FakeClient()
    body = {"model": "fake", "input": "Hello", "instructions": "Be brief.", "max_output_tokens": 3, "temperature": 0.5}
    answer = posted(RESPONSES, body, client).json()
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "incomplete", "fake")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = answer["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == "w0 w1 w2 "
    assert answer["usage"]["output_tokens"] == 3 and answer["usage"]["total_tokens"] > 3
    [request] = client.requests
    assert request.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    assert (request.sampling.temperature, request.max_tokens) == (0.5, 3)


def test_events_of_a_response_come_in_order() -> None:
    client = FakeClient(tokens=3)
    response = posted(RESPONSES, {"input": USER, "stream": True}, client)
    found = sse(response.text)
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 3, "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert response.text.endswith("data: [DONE]\n\n")
    final = found[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == "w0 w1 w2 " == "".join(e.get("delta", "") for e in found)
    assert found[0]["response"]["output"] == [] and found[0]["response"]["usage"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_what_follows(stream: bool) -> None:
    response = posted(RESPONSES, {"input": USER, "tools": [WEATHER], "tool_choice": "required", "stream": stream})
    final = sse(response.text)[-1]["response"] if stream else response.json()
    [call] = final["output"]
    assert (call["type"], call["name"], call["arguments"], call["status"]) == (
        "function_call",
        "weather",
        '{"city": "Paris"}',
        "completed",
    )
    client = FakeClient()
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    assert posted(RESPONSES, {"input": [*USER, call, result], "tools": [WEATHER]}, client).status_code == 200
    [request] = client.requests
    _, assistant, tool = request.messages or ()
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert (tool["role"], tool["content"], tool["tool_call_id"]) == ("tool", "sunny", call["call_id"])


def test_reasoning_is_an_item_of_its_own_and_comes_back_with_what_it_led_to() -> None:
    """The fake thinks its first two words."""

    class Thinking(FakeClient):
        async def generate(self, request: Any) -> Any:
            import msgspec

            async for delta in super().generate(msgspec.structs.replace(request, thinking=True)):
                yield delta

    client = Thinking(tokens=4)
    for stream in (False, True):
        response = posted(RESPONSES, {"input": USER, "stream": stream}, client)
        events = sse(response.text) if stream else []
        final = events[-1]["response"] if stream else response.json()
        reasoning, message = final["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "w0 w1 "}]
        assert message["content"][0]["text"] == "w2 w3 "
    assert [e["type"] for e in events].count("response.reasoning_text.delta") == 2
    posted(RESPONSES, {"input": [*USER, reasoning, message, *USER]}, client)
    assert (client.requests[-1].messages or ())[1]["reasoning_content"] == "w0 w1 "


def test_a_stored_response_is_continued_read_and_deleted() -> None:
    async def ask() -> None:
        client = FakeClient(tokens=2)
        async with in_process(client, api_keys=("alpha", "beta")) as (http, service):
            mine, other = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
            first = (await http.post(RESPONSES, json={"input": "One"}, headers=mine)).json()
            path = f"{RESPONSES}/{first['id']}"
            follow = {"input": "Two", "previous_response_id": first["id"], "instructions": "New."}
            second = (await http.post(RESPONSES, json=follow, headers=mine)).json()
            assert [m["content"] for m in client.requests[-1].messages or ()] == ["New.", "One", "w0 w1 ", "Two"]
            third = {"input": "Three", "previous_response_id": second["id"]}
            await http.post(RESPONSES, json=third, headers=mine)
            assert [m["content"] for m in client.requests[-1].messages or ()] == ["One", "w0 w1 ", "Two", "w0 w1 ", "Three"]
            assert (await http.get(path, headers=mine)).json() == first
            items = (await http.get(f"{path}/input_items", headers=mine)).json()
            assert [item["content"][0]["text"] for item in items["data"]] == ["One"]
            # Another key's responses are not there.
            for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
                assert (await http.request(method, where, headers=other)).status_code == 404
            refused = await http.post(RESPONSES, json=follow, headers=other)
            assert refused.status_code == 404 and refused.json()["error"]["param"] == "previous_response_id"
            assert (await http.delete(path, headers=mine)).json()["deleted"] is True
            assert (await http.get(path, headers=mine)).status_code == 404
            unstored = (await http.post(RESPONSES, json={"input": "x", "store": False, "stream": True}, headers=mine)).text
            assert (await http.get(f"{RESPONSES}/{sse(unstored)[-1]['response']['id']}", headers=mine)).status_code == 404
            assert len(service.responses) == 2

    asyncio.run(ask())


def test_what_is_stored_is_bounded() -> None:
    now = [0.0]
    stored = StoredResponses(max_responses=2, max_bytes=200, max_seconds=10, clock=lambda: now[0])
    for number in range(3):
        stored.put("a", {"id": f"r{number}"}, [])
    assert stored.get("a", "r0") is None and stored.get("a", "r2") is not None and len(stored) == 2
    stored.put("a", {"id": "long", "text": "x" * 190}, [])
    assert stored.get("a", "long") is None or stored.num_bytes <= 200
    stored.put("a", {"id": "huge", "text": "x" * 500}, [])
    assert stored.get("a", "huge") is None
    now[0] = 11.0
    assert stored.get("a", "r2") is None and len(stored) == 0 == stored.num_bytes


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
        ({"input": "x" * 9000}, "input"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.json_schema.schema"),
    ],
)
def test_what_a_response_cannot_do_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    answer = posted(RESPONSES, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, CHAT])
def test_a_stream_that_breaks_says_so_in_its_own_words(path: str) -> None:
    class Breaking(FakeClient):
        async def generate(self, request: Any) -> Any:
            async for delta in super().generate(request):
                yield delta
                raise Unavailable("/secret/path")

    body = {"input": USER, "messages": USER, "max_tokens": 5, "model": "fake", "stream": True}
    keep = {RESPONSES: ("input", "stream"), MESSAGES: ("messages", "max_tokens", "stream"), CHAT: ("model", "messages")}[path]
    text = posted(path, {name: body[name] for name in keep}, Breaking()).text
    assert "secret" not in text
    if path == RESPONSES:
        assert sse(text)[-1]["response"]["status"] == "failed"
    elif path == MESSAGES:
        assert sse(text)[-1]["error"]["type"] == "overloaded_error"
    else:
        assert "error" in json.loads(text.splitlines()[-1])


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_message() -> None:
    client = FakeClient()
    body = {
        "model": "fake", "max_tokens": 3, "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": USER, "temperature": 0.5, "top_k": 5, "stop_sequences": ["x"], "metadata": {"user_id": "u"},
    }  # fmt: skip
    answer = posted(MESSAGES, body, client).json()
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert answer["content"] == [{"type": "text", "text": "w0 w1 w2 "}] and answer["usage"]["output_tokens"] == 3
    [request] = client.requests
    assert request.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    assert request.stop == ("x",) and request.sampling.top_k == 5 and request.owner.endswith("/u")


def test_events_of_a_message_come_in_order() -> None:
    found = sse(posted(MESSAGES, {"max_tokens": 3, "messages": USER, "stream": True}).text)
    assert [event["type"] for event in found] == [
        "message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert found[0]["message"]["content"] == [] and found[-2]["delta"]["stop_reason"] == "max_tokens"
    assert found[-2]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_used(stream: bool) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = {"max_tokens": 50, "messages": USER, "tools": tools, "tool_choice": {"type": "any"}, "stream": stream}
    response = posted(MESSAGES, body)
    if stream:
        found = sse(response.text)
        [block] = [event["content_block"] for event in found if event["type"] == "content_block_start"]
        block["input"] = json.loads(
            "".join(e["delta"].get("partial_json", "") for e in found if e["type"] == "content_block_delta")
        )
        reason = found[-2]["delta"]["stop_reason"]
    else:
        [block], reason = response.json()["content"], response.json()["stop_reason"]
    assert (block["type"], block["name"], block["input"], reason) == ("tool_use", "weather", {"city": "Paris"}, "tool_use")
    client = FakeClient()
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "sunny"}]}
    follow = [
        *USER,
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    assert posted(MESSAGES, {"max_tokens": 5, "messages": follow, "tools": tools}, client).status_code == 200
    assert [m["role"] for m in client.requests[0].messages or ()] == ["user", "assistant", "tool", "user"]


def test_a_message_that_has_begun_is_continued() -> None:
    client = FakeClient()
    posted(MESSAGES, {"max_tokens": 5, "messages": [*USER, {"role": "assistant", "content": "The sky"}]}, client)
    assert client.requests[0].continues_answer


def test_thinking_is_switched_and_its_budget_is_no_promise() -> None:
    client = FakeClient()
    response = posted(
        MESSAGES, {"max_tokens": 50, "messages": USER, "thinking": {"type": "enabled", "budget_tokens": 1024}}, client
    )
    assert response.headers["windlass-unenforced"] == "thinking.budget_tokens"
    assert response.json()["content"][0] == {"type": "thinking", "thinking": "w0 w1 ", "signature": ""}
    assert client.requests[0].thinking is True


def test_thinking_has_no_effect_where_no_template_can_switch_it() -> None:
    class Plain(FakeClient):
        def tokenizer_info(self) -> dict[str, Any]:
            return {"chat_template": "{{ messages[0].content }}"}

    client = Plain()
    answer = posted(MESSAGES, {"max_tokens": 8, "messages": USER, "thinking": {"type": "enabled", "budget_tokens": 50}}, client)
    assert answer.status_code == 200 and client.requests[0].thinking is None
    assert answer.headers["windlass-unenforced"] == "thinking.type,thinking.budget_tokens"


def test_errors_are_in_anthropics_format() -> None:
    for body, status, kind in (
        ({"messages": USER}, 400, "invalid_request_error"),
        ({"messages": USER, "max_tokens": 5, "model": "another-model"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": "x" * 9000}], "max_tokens": 5}, 400, "invalid_request_error"),
    ):
        answer = posted(MESSAGES, body)
        assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert "prompt is too long" in answer.json()["error"]["message"]
    assert (
        posted(MESSAGES, {"messages": USER, "max_tokens": 5}, api_keys=("alpha",)).json()["error"]["type"]
        == "authentication_error"
    )
    [found] = asked(("GET", "/v1/messages/nothing", None))
    assert found.json()["error"]["type"] == "not_found_error"


def test_tokens_are_counted() -> None:
    [answer] = asked(("POST", "/v1/messages/count_tokens", {"messages": USER, "model": "fake"}))
    assert answer.json() == {"input_tokens": len("<user>Hello")}


# --- Ollama's --------------------------------------------------------------------------------------------------------


def test_a_chat_of_ollama() -> None:
    client = FakeClient()
    options = {"num_predict": 3, "temperature": 0.5, "repeat_penalty": 1.1, "num_thread": 4, "num_ctx": 2048}
    response = posted(CHAT, {"model": "fake:latest", "messages": USER, "options": options}, client)
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert response.headers["content-type"] == "application/x-ndjson"
    assert "".join(line["message"]["content"] for line in lines) == "w0 w1 w2 "
    assert [line["done"] for line in lines] == [False] * 3 + [True]
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("length", 3) and lines[-1]["prompt_eval_duration"] > 0
    assert response.headers["windlass-unenforced"] == "options.num_thread"
    assert client.requests[0].sampling.repetition_penalty == 1.1 and client.requests[0].max_tokens == 3
    whole = posted(CHAT, {"model": "fake", "messages": USER, "stream": False, "options": {"num_predict": 3}}).json()
    assert whole["message"] == {"role": "assistant", "content": "w0 w1 w2 "} and whole["done"]


def test_generate_uses_the_template_unless_it_is_raw() -> None:
    client = FakeClient()
    for raw in (False, True):
        answer = posted(GENERATE, {"model": "fake", "prompt": "Hello", "raw": raw, "stream": False}, client).json()
        assert answer["response"].startswith("w0 w1 ")
    assert client.requests[0].messages == ({"role": "user", "content": "Hello"},) and client.requests[1].prompt == "Hello"
    assert client.requests[1].max_tokens is None


def test_a_call_of_ollama() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {"model": "fake", "messages": [{"role": "user", "content": "weather?"}], "tools": [tool], "stream": False}
    [call] = posted(CHAT, body).json()["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and call["function"]["arguments"] == {"city": "Paris"}


def test_models_of_ollama() -> None:
    tags, ps, version, show, pull, other = asked(
        ("GET", "/api/tags", None), ("GET", "/api/ps", None), ("GET", "/api/version", None), ("POST", "/api/show", {"model": "fake"}),
        ("POST", "/api/pull", {"model": "fake"}), ("POST", "/api/pull", {"model": "llama3"}),
    )  # fmt: skip
    assert tags.json()["models"][0]["name"] == "fake" and ps.json()["models"][0]["context_length"] == 4096
    assert version.json()["version"] and "tools" in show.json()["capabilities"]
    assert json.loads(pull.text)["status"] == "success" and other.status_code == 404 and isinstance(other.json()["error"], str)


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (CHAT, {"messages": USER, "options": {"num_ctx": 10**6}}, "options.num_ctx"),
        (CHAT, {"messages": USER, "options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {"messages": USER, "options": {"temperature": -1}}, "options.temperature"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, "images"),
        (CHAT, {"messages": USER, "format": "xml"}, "format"),
        (GENERATE, {"prompt": "x", "context": [1, 2]}, "context"),
    ],
)
def test_what_ollama_can_and_we_cannot_is_refused_by_name(path: str, body: dict[str, Any], word: str) -> None:
    answer = posted(path, {"model": "fake", **body})
    assert answer.status_code == 400 and word in answer.json()["error"], answer.text


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_embeddings_have_length_one() -> None:
    answer = posted("/v1/embeddings", {"input": ["ab", "c"], "model": "fake"}).json()
    assert [entry["embedding"] for entry in answer["data"]] == [[0.6, 0.8, 0.0]] * 2 and answer["usage"]["prompt_tokens"] == 3
    cut = posted("/v1/embeddings", {"input": [1, 2], "dimensions": 1, "pooling": "mean"}).json()
    assert cut["data"][0]["embedding"] == [1.0]
    packed = posted("/v1/embeddings", {"input": "a", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(packed)) == pytest.approx((0.6, 0.8, 0.0))
    assert posted("/api/embed", {"model": "fake", "input": ["a"]}).json()["embeddings"] == [[0.6, 0.8, 0.0]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [1, ["a"]]}, "input"),
        ({"input": {"content": "a"}}, "input"),
        ({"input": [{"content": [{"type": "image_url"}]}]}, "input[0].content[0]"),
        ({"input": {"prompt_string": "a", "more": 1}}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    refused = posted("/v1/embeddings", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_texts_to_embed_have_many_forms() -> None:
    mixed = [
        "a",
        [98, 99],
        [100, "e"],
        {"prompt_string": "f"},
        {"content": [{"type": "text", "text": "g"}, {"type": "text", "text": "h"}]},
    ]
    answer = posted("/v1/embeddings", {"input": mixed}).json()
    assert len(answer["data"]) == 5 and answer["usage"]["prompt_tokens"] == 1 + 2 + 2 + 1 + 2
    assert posted("/v1/embeddings", {"input": [1, "two", 3]}).json()["usage"]["prompt_tokens"] == 5


def test_documents_are_ranked() -> None:
    class Scoring(FakeClient):
        async def score(self, request: Any) -> Any:
            found = await super().score(request)
            text = bytes(request.token_ids or ()).decode()
            assert text[request.start :] == " sky?"
            like = -0.1 if "blue" in text else -2.0
            return Scores(
                token_ids=found.token_ids, logprobs=tuple(TokenLogprob(token_id=0, logprob=like) for _ in found.logprobs)
            )

    body = {"query": "sky?", "documents": ["grass", {"text": "blue"}, "rock"], "top_n": 2, "return_documents": True}
    results = posted("/v1/rerank", body, Scoring()).json()["results"]
    assert [result["index"] for result in results] == [1, 0] and results[0]["document"] == {"text": "blue"}
    assert results[0]["relevance_score"] == pytest.approx(math.exp(-0.1))
    tei = {"query": "sky?", "texts": ["grass", "blue"], "return_text": True, "truncate": False, "raw_scores": False}
    ranks = posted("/rerank", tei, Scoring()).json()
    assert [(rank["index"], rank["text"]) for rank in ranks] == [(1, "blue"), (0, "grass")]
    assert (
        ranks[0]["score"] == pytest.approx(math.exp(-0.1)) and len(posted("/rerank", {**tei, "top_n": 1}, Scoring()).json()) == 1
    )


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"texts": None}, "documents"),
        ({"documents": ["a"]}, "documents"),
        ({"texts": []}, "texts"),
        ({"truncate": True}, "truncate"),
        ({"raw_scores": True}, "raw_scores"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ],
)
def test_what_reranking_does_not_do_is_said(changes: dict[str, Any], param: str) -> None:
    refused = posted("/rerank", {"query": "sky?", "texts": ["grass"], **changes})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


def test_what_lm_eval_asks_before_it_begins() -> None:
    info, tokens = asked(("GET", "/tokenizer_info", None), ("POST", "/tokenize", {"prompt": "test", "add_special_tokens": False}))
    assert info.json() == {"eos_token": "</s>", "model_max_length": 4096} and tokens.json()["count"] == 4


# --- all of them -----------------------------------------------------------------------------------------------------


def test_tokens_of_a_response_and_of_a_chat_are_counted() -> None:
    chat = posted("/v1/chat/completions/input_tokens", HELLO).json()
    response = posted("/v1/responses/input_tokens", {"input": "Hello"}).json()
    assert chat["input_tokens"] == response["input_tokens"] > 0 and response["object"] == "response.input_tokens"


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/embeddings"])
def test_paths_without_a_version(path: str) -> None:
    body = {**HELLO} if "chat" in path else {"input": "Hello"}
    assert posted(path, body).status_code == 200
    assert posted(path, body, api_keys=("alpha",)).status_code == 401


def test_every_new_route_needs_a_key() -> None:
    from windlass.tasks.serve.routing.other_routes import OTHER_ROUTES

    requests = [(route.method, route.path.replace("{id}", "x"), HELLO) for route in OTHER_ROUTES]
    assert {answer.status_code for answer in asked(*requests, api_keys=("alpha",))} == {401}
