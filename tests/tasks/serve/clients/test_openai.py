"""The official Python client, against the scripted engine and against SmolLM2."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake import FakeClient
from serving import Running, get, post, running

from waiting import HUNG_SECONDS

openai = pytest.importorskip("openai")
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def client_of(server: Running, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, **options)


@pytest.fixture(scope="module")
def fake() -> Any:
    with running(lambda: FakeClient(seconds=0.001)) as server:
        yield server


# --- the scripted engine ---------------------------------------------------------------------------------------------


@pytest.mark.pure
class TestFake:
    def test_models(self, fake: Running) -> None:
        with client_of(fake) as client:
            assert [model.id for model in client.models.list()] == ["fake"]
            assert client.models.retrieve("fake").owned_by == "windlass"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("other")

    def test_a_chat(self, fake: Running) -> None:
        with client_of(fake) as client:
            answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=3, n=2)
            assert [choice.message.content for choice in answer.choices] == ["w0 w1 w2 "] * 2
            assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 6

    def test_a_streamed_chat(self, fake: Running) -> None:
        with client_of(fake) as client:
            stream = client.chat.completions.create(
                model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            assert text == "".join(f"w{number} " for number in range(8)) and chunks[-1].usage.completion_tokens == 8

    def test_leaving_a_stream_early(self, fake: Running) -> None:
        with client_of(fake) as client:
            with client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, max_tokens=4000) as stream:
                next(iter(stream))
            fake.until(lambda: len(fake.service.in_flight) == 0)

    def test_a_tool(self, fake: Running) -> None:
        with client_of(fake) as client:
            answer = client.chat.completions.create(model="fake", messages=MESSAGES, tools=[WEATHER], tool_choice="required")
            [call] = answer.choices[0].message.tool_calls
            assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}
            assert answer.choices[0].finish_reason == "tool_calls"
            follow: Any = [*MESSAGES, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
            assert client.chat.completions.create(model="fake", messages=follow, tools=[WEATHER]).choices[0].message.content

    def test_an_answer_parsed_by_pydantic(self, fake: Running) -> None:
        from pydantic import BaseModel

        class City(BaseModel):
            name: str
            people: int

        with client_of(fake) as client:
            answer = client.chat.completions.parse(model="fake", messages=MESSAGES, response_format=City)
            assert answer.choices[0].message.parsed == City(name="text", people=1)

    def test_the_streaming_helper(self, fake: Running) -> None:
        with client_of(fake) as client, client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
            kinds = {event.type for event in stream}
            assert {"chunk", "content.delta", "content.done"} <= kinds
            assert stream.get_final_completion().choices[0].message.content.startswith("w0 w1 ")

    def test_completions(self, fake: Running) -> None:
        with client_of(fake) as client:
            answer = client.completions.create(model="fake", prompt=["abc", "de"], max_tokens=1, echo=True, logprobs=1)
            assert [choice.text for choice in answer.choices] == ["abcw0 ", "dew0 "]
            assert answer.choices[0].logprobs.tokens == ["a", "b", "c", "w0 "]
            chunks = list(client.completions.create(model="fake", prompt="abc", max_tokens=3, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == "w0 w1 w2 "

    def test_errors_are_the_clients_own(self, fake: Running) -> None:
        with client_of(fake) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
            assert refused.value.param == "temperature"
            with pytest.raises(openai.NotFoundError) as unknown:
                client.chat.completions.create(model="gpt-9", messages=MESSAGES)
            assert unknown.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as long:
                client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 10_000}])
            assert long.value.code == "context_length_exceeded"

    def test_keys(self) -> None:
        with running(api_keys=("alpha",)) as server:
            with client_of(server) as client, pytest.raises(openai.AuthenticationError):
                client.models.list()
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="alpha") as client:
                assert client.models.list().data

    def test_a_full_queue_is_tried_again_after_the_time_it_was_told(self) -> None:
        with running(lambda: FakeClient(seconds=0.1, tokens=3, slots=1), max_waiting=0) as server:

            async def ask() -> list[str]:
                async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=8) as client:
                    asked = (client.chat.completions.create(model="fake", messages=MESSAGES) for _ in range(3))
                    return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

            with client_of(server) as client:
                client.chat.completions.create(model="fake", messages=MESSAGES)  # how long it takes is known from now on
            assert asyncio.run(ask()) == ["w0 w1 w2 "] * 3
            assert server.service.metrics.outcomes["full"] >= 1

    def test_asynchronous_streams_side_by_side(self, fake: Running) -> None:
        async def one(client: Any) -> str:
            stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, max_tokens=20)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def ask() -> set[str]:
            async with openai.AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="x") as client:
                return set(await asyncio.gather(*(one(client) for _ in range(20))))

        assert asyncio.run(ask()) == {"".join(f"w{number} " for number in range(20))}


# --- a real model ----------------------------------------------------------------------------------------------------


@pytest.mark.cpu
class TestSmolLM2:
    def test_streamed_and_whole_say_the_same(self, smollm2_server: Running) -> None:
        with client_of(smollm2_server) as client:
            asked: Any = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
            whole = client.chat.completions.create(**asked)
            streamed = "".join(
                choice.delta.content or ""
                for chunk in client.chat.completions.create(**asked, stream=True)
                for choice in chunk.choices
            )
            assert whole.choices[0].message.content == streamed != ""
            assert whole.usage.completion_tokens <= 12

    def test_the_same_seed_gives_the_same_answers(self, smollm2_server: Running) -> None:
        with client_of(smollm2_server) as client:
            asked: Any = {"model": "smollm2", "messages": MESSAGES, "seed": 5, "max_tokens": 8, "n": 3}
            first, second = (client.chat.completions.create(**asked) for _ in range(2))
            texts = [choice.message.content for choice in first.choices]
            assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) > 1

    def test_a_schema_is_kept(self, smollm2_server: Running) -> None:
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
            "required": ["city", "large"],
            "additionalProperties": False,
        }
        format: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        with client_of(smollm2_server) as client:
            answer = client.chat.completions.create(
                model="smollm2", messages=MESSAGES, response_format=format, max_tokens=80, temperature=0
            )
            found = json.loads(answer.choices[0].message.content)
            assert set(found) == {"city", "large"} and isinstance(found["large"], bool)

    def test_a_model_whose_template_has_no_tools_calls_by_convention(self, smollm2_server: Running) -> None:
        """Required, it calls once; cut off, nothing of the call is content."""
        with client_of(smollm2_server) as client:
            asked: Any = {
                "model": "smollm2",
                "messages": MESSAGES,
                "tools": [WEATHER],
                "tool_choice": "required",
                "temperature": 0,
            }
            raw = client.chat.completions.with_raw_response.create(max_tokens=80, **asked)
            assert raw.headers["windlass-tools"] == "convention"
            choice = raw.parse().choices[0]
            [call] = choice.message.tool_calls
            assert call.function.name == "weather"
            if choice.finish_reason == "tool_calls":
                assert "city" in json.loads(call.function.arguments)
            for limit in (1, 3, 8, 14):
                message = client.chat.completions.create(max_tokens=limit, **asked).choices[0].message
                assert not message.content

    def test_no_token_stops_before_the_least(self, smollm2_server: Running) -> None:
        with client_of(smollm2_server) as client:
            asked: Any = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
            tokens = client.chat.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0].token_ids
            stops = {"stop_token_ids": tokens[3:4]}
            assert client.chat.completions.create(**asked, extra_body=stops).usage.completion_tokens <= 4
            assert client.chat.completions.create(**asked, extra_body=stops | {"min_tokens": 9}).usage.completion_tokens >= 9

    def test_headers_come_before_the_first_token_and_errors_before_headers(self, smollm2_server: Running) -> None:
        with client_of(smollm2_server) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
                client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "x " * 3000}], stream=True)
            bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"not": {}}}}
            with pytest.raises(openai.BadRequestError, match="strict"):
                client.chat.completions.create(model="smollm2", messages=MESSAGES, stream=True, response_format=bad)

    def test_a_texts_logprobs_are_those_of_its_parts(self, smollm2_server: Running) -> None:
        with client_of(smollm2_server) as client:
            asked: Any = {"model": "smollm2", "max_tokens": 0, "echo": True, "logprobs": 1}
            whole = client.completions.create(prompt="The capital of France is Paris.", **asked).choices[0]
            assert whole.text == "The capital of France is Paris." and whole.logprobs.token_logprobs[0] is None
            assert all(math.isfinite(value) and value <= 0 for value in whole.logprobs.token_logprobs[1:])
            part = client.completions.create(prompt="The capital of France is", **asked).choices[0]
            count = len(part.logprobs.tokens)
            assert whole.logprobs.tokens[:count] == part.logprobs.tokens
            assert whole.logprobs.token_logprobs[1:count] == pytest.approx(part.logprobs.token_logprobs[1:], abs=0.15)

    def test_a_prompt_that_is_too_long_is_refused(self, smollm2_server: Running) -> None:
        with client_of(smollm2_server) as client, pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="smollm2", prompt="word " * 2000)
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"

    def test_a_text_of_megabytes_does_not_hold_up_the_others(
        self, smollm2_server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Cutting it into tokens takes long: others are answered between its beginning and its end."""
        client: Any = smollm2_server.client
        tokenize, begun, ended = client.tokenize, threading.Event(), threading.Event()

        async def noted(text: Any, owner: str = "") -> list[int]:
            begun.set()
            try:
                return await tokenize(text)
            finally:
                ended.set()

        monkeypatch.setattr(client, "tokenize", noted)
        body, answered = {"model": "smollm2", "prompt": "word " * 400_000}, 0
        with ThreadPoolExecutor(1) as aside:
            asking = aside.submit(post, f"{smollm2_server.url}/tokenize", json=body)
            assert begun.wait(HUNG_SECONDS), "hung"
            while not ended.is_set():
                assert get(f"{smollm2_server.url}/health").status_code == 200
                answered += not ended.is_set()
        assert asking.result().json()["count"] >= 400_000
        assert answered >= 2

    def test_one_that_leaves_frees_the_engine(self, smollm2_server: Running) -> None:
        with client_of(smollm2_server) as client:
            asked: Any = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 900, "stream": True}
            service = smollm2_server.service
            cancelled, told = service.metrics.outcomes["cancelled"], service.stats.completion_tokens
            with client.chat.completions.create(**asked, extra_body={"ignore_eos": True}) as stream:
                next(iter(stream))
        smollm2_server.until(lambda: len(service.in_flight) == 0)
        smollm2_server.until(lambda: service.stats.running == 0)
        assert service.metrics.outcomes["cancelled"] == cancelled + 1 and service.stats.completion_tokens < told + 900
