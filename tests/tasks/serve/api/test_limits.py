"""Limits that hold: of a key's tokens while requests run, of embeddings that nobody waits for, of what a batch and a disk can take."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake import FakeClient
from serving import HELLO, in_process, posted

from windlass.core.request import Embedding, EmbedRequest
from windlass.errors import DoesNotFit
from windlass.tasks.serve.api_key import ApiKey
from windlass.tasks.serve.backend.stored_responses import StoredResponses
from windlass.tasks.serve.batch import runner
from windlass.tasks.serve.batch.files import FileStore
from windlass.tasks.serve.http.body_reader import BodyReader
from windlass.wire.schema.errors import ApiError

pytestmark = pytest.mark.pure
CHAT = "/v1/chat/completions"
KEY = {"Authorization": "Bearer alpha"}


class SlowEmbeddings(FakeClient):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def embed(self, request: EmbedRequest) -> Embedding:
        self.asked += 1
        if self.asked > 1:
            await asyncio.sleep(3600)
        return await super().embed(request)


def test_requests_at_once_cannot_exceed_a_keys_tokens_together() -> None:
    async def run() -> None:
        key = ApiKey(name="a", key="alpha", tokens_per_minute=100)
        client = FakeClient(hold_after=1)
        async with in_process(client, api_keys=(key,)) as (http, _):
            first = asyncio.create_task(http.post(CHAT, json={**HELLO, "max_tokens": 90}, headers=KEY))
            while not client.running:
                await asyncio.sleep(0.005)
            assert (await http.post(CHAT, json={**HELLO, "max_tokens": 90}, headers=KEY)).status_code == 429
            client.release()
            assert (await first).status_code == 200

    asyncio.run(run())


def test_embeddings_end_at_the_deadline_and_what_was_made_is_counted() -> None:
    async def run() -> None:
        client = SlowEmbeddings()
        key = ApiKey(name="a", key="alpha")
        async with in_process(client, deadline_seconds=0.2, api_keys=(key,)) as (http, service):
            late = await http.post("/v1/embeddings", json={"input": ["ab", "cd", "ef"]}, headers=KEY)
            assert late.status_code == 408 and len(service.in_flight) == 0 and client.asked == 2
            assert 'windlass_key_tokens_total{key="a",kind="prompt"} 2.0' in service.metrics.text().decode()

    asyncio.run(run())


def test_one_owner_cannot_push_out_the_responses_of_another() -> None:
    stored = StoredResponses(max_responses=4, max_bytes=10_000)
    stored.put("small", {"id": "mine"}, [])
    for number in range(50):
        stored.put("large", {"id": f"r{number}", "text": "x" * 50}, [])
    assert stored.get("small", "mine") is not None and len(stored) == 4


def test_bodies_that_wait_for_a_parser_count() -> None:
    reader = BodyReader(max_each=100, max_total=150, seconds=1.0)
    with reader.held(100):
        with pytest.raises(ApiError), reader.held(100):
            raise AssertionError("was accepted")
        with reader.held(50):
            assert reader.buffered_bytes == 150
    assert reader.buffered_bytes == 0


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FileStore, *_: Any, **__: Any) -> None:
        raise DoesNotFit("disk full: /secret/path needs 1 byte more", 1)

    async def run() -> httpx.Response:
        async with in_process(FakeClient(), files_folder=str(tmp_path)) as (http, _):
            monkeypatch.setattr(FileStore, "put", full)
            return await http.post("/v1/files", files={"file": ("x", b"x")}, data={"purpose": "batch"})

    answer = asyncio.run(run())
    assert answer.status_code == 507 and answer.json()["error"]["code"] == "disk_full" and "secret" not in answer.text


def test_the_output_of_a_batch_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_OUTPUT_BYTES", 1500)
    lines = "\n".join(
        f'{{"custom_id": "{number}", "method": "POST", "url": "{CHAT}", "body": {{"messages": [{{"role": "user", "content": "x"}}]}}}}'
        for number in range(6)
    )

    async def run() -> None:
        async with in_process(FakeClient(), files_folder=str(tmp_path)) as (http, _):
            file = await http.post("/v1/files", files={"file": ("x.jsonl", lines)}, data={"purpose": "batch"})
            body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
            batch = (await http.post("/v1/batches", json=body)).json()
            while (found := (await http.get(f"/v1/batches/{batch['id']}")).json())["status"] == "in_progress":
                await asyncio.sleep(0.02)
            counts = found["request_counts"]
            assert counts["completed"] + counts["failed"] == 6 and counts["completed"] >= 1 and counts["failed"] >= 1
            errors = (await http.get(f"/v1/files/{found['error_file_id']}/content")).text
            assert "divide it into several" in errors

    asyncio.run(run())


def test_priorities_reach_the_engine_and_a_key_bounds_them() -> None:
    client = FakeClient()
    assert posted(CHAT, {**HELLO, "priority": -3}, client).status_code == 200
    assert client.requests[0].priority == -3
    assert posted(CHAT, {**HELLO, "priority": 5}).status_code == 400

    async def run() -> list[int]:
        keys = (ApiKey(name="a", key="alpha", priority=1), ApiKey(name="b", key="beta", priority=-2))
        asked = FakeClient()
        async with in_process(asked, api_keys=keys) as (http, _):
            for key, priority in (("alpha", -4), ("alpha", 3), ("beta", 0), ("beta", -4)):
                headers = {"Authorization": f"Bearer {key}"}
                await http.post(CHAT, json={**HELLO, "priority": priority}, headers=headers)
        return [request.priority for request in asked.requests]

    assert asyncio.run(run()) == [1, 3, 0, -2]


def test_an_adapter_is_named_beside_its_model_or_alone() -> None:
    async def run() -> None:
        client = FakeClient()
        async with in_process(client, model="base", adapters=(("legal", "/secret/legal"),)) as (http, _):
            for name, shown in (("base:legal", "base:legal"), ("legal", "base:legal"), ("base", "base"), ("", "base")):
                answer = await http.post(CHAT, json={**HELLO, "model": name})
                assert answer.json()["model"] == shown, name
            assert [request.adapter for request in client.requests] == ["legal", "legal", "", ""]
            message = {"model": "base:legal", "max_tokens": 2, "messages": HELLO["messages"]}
            assert (await http.post("/v1/messages", json=message)).json()["model"] == "base:legal"
            assert (await http.post("/api/chat", json={**HELLO, "model": "base:legal", "stream": False})).status_code == 200
            assert (await http.post("/v1/responses", json={"model": "legal", "input": "x"})).json()["model"] == "base:legal"
            assert {request.adapter for request in client.requests[4:]} == {"legal"}
            cards = (await http.get("/v1/models")).json()["data"]
            assert [(card["id"], card.get("parent")) for card in cards] == [("base", None), ("base:legal", "base")]
            refused = await http.post(CHAT, json={**HELLO, "model": "base:other"})
            assert refused.status_code == 404 and "secret" not in refused.text + str(cards)

    asyncio.run(run())
