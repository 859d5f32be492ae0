"""Files and batches: whose they are, what is written, and that a server which is started again goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake import FakeClient
from serving import in_process

from waiting import HUNG_SECONDS
from windlass.core.request import Delta, Request
from windlass.model.formats.disk.atomic import write_atomically
from windlass.tasks.serve.api.adapters import chat_job
from windlass.tasks.serve.api_key import ApiKey
from windlass.tasks.serve.batch.batches import BatchStore, new_batch
from windlass.tasks.serve.batch.endpoints import ENDPOINTS, form_fields
from windlass.tasks.serve.batch.files import FileStore
from windlass.tasks.serve.http.body_reader import LARGE_BYTES

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"


def line(number: int, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": number + 1, **body}
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": asked}


def lines(*entries: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


async def uploaded(http: httpx.AsyncClient, data: bytes, **options: Any) -> str:
    answer = await http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


async def ended(http: httpx.AsyncClient, id: str, **options: Any) -> dict[str, Any]:
    async with asyncio.timeout(HUNG_SECONDS):
        while True:
            batch = (await http.get(f"/v1/batches/{id}", **options)).json()
            if batch["status"] not in ("in_progress", "cancelling"):
                return batch
            await asyncio.sleep(0.01)


def served(
    folder: Path, test: Callable[[httpx.AsyncClient], Awaitable[None]], client: FakeClient | None = None, **settings: Any
) -> None:
    async def run() -> None:
        async with in_process(client or FakeClient(), files_folder=str(folder), **settings) as (http, _):
            await test(http)

    asyncio.run(run())


def test_a_batch_is_worked_off(tmp_path: Path) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        file = await uploaded(http, lines(line(0), line(1), line(2, temperature=-1)))
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        created = (await http.post("/v1/batches", json=body)).json()
        batch = await ended(http, created["id"])
        assert batch["status"] == "completed" and batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        output = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
        found = {entry["custom_id"]: entry["response"]["body"] for entry in map(json.loads, output.splitlines())}
        assert {id: answer["choices"][0]["message"]["content"] for id, answer in found.items()} == {"c0": "w0 ", "c1": "w0 w1 "}
        [failed] = map(json.loads, (await http.get(f"/v1/files/{batch['error_file_id']}/content")).text.splitlines())
        assert failed["custom_id"] == "c2" and failed["response"]["status_code"] == 400
        assert len((await http.get("/v1/batches")).json()["data"]) == 1 and len((await http.get("/v1/files")).json()["data"]) == 3
        assert (await http.delete(f"/v1/files/{file}")).json()["deleted"]

    served(tmp_path, test)
    assert not list(tmp_path.glob("*.partial"))


def test_a_large_line_is_read_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def noting(service: Any, raw: bytes, caller: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return chat_job(service, raw, caller)

    monkeypatch.setitem(ENDPOINTS, CHAT, noting)

    async def test(http: httpx.AsyncClient) -> None:
        large = line(0, messages=[{"role": "user", "content": "a" * LARGE_BYTES}])
        body = {"input_file_id": await uploaded(http, lines(large)), "endpoint": CHAT, "completion_window": "24h"}
        await ended(http, (await http.post("/v1/batches", json=body)).json()["id"])

    served(tmp_path, test)
    assert threads == [False]


def test_a_server_started_again_goes_on(tmp_path: Path) -> None:
    """One of two lines was answered before; half of another line had been written."""
    files = FileStore(tmp_path, write_atomically)
    store = BatchStore(files)
    file = files.put("", "in.jsonl", "batch", lines(line(0), line(1)))
    batch = new_batch("", CHAT, file.id, 2, None)
    store.save(batch)
    before = {"id": "x", "custom_id": "c0", "response": {"status_code": 200, "body": {"earlier": True}}, "error": None}
    store.partial(batch).write_bytes(json.dumps(before).encode() + b'\n{"custom_id": "c1", "resp')
    client = FakeClient()

    async def test(http: httpx.AsyncClient) -> None:
        done = await ended(http, batch.id)
        text = (await http.get(f"/v1/files/{done['output_file_id']}/content")).text
        assert sorted(json.loads(entry)["custom_id"] for entry in text.splitlines()) == ["c0", "c1"]
        assert any(json.loads(entry)["response"]["body"].get("earlier") for entry in text.splitlines())

    served(tmp_path, test, client)
    assert len(client.requests) == 1


def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    client = FakeClient(hold_after=0)

    async def test(http: httpx.AsyncClient) -> None:
        file = await uploaded(http, lines(*(line(number) for number in range(20))))
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        id = (await http.post("/v1/batches", json=body)).json()["id"]
        assert (await http.post(f"/v1/batches/{id}/cancel")).json()["status"] == "cancelling"
        client.release()
        batch = await ended(http, id)
        assert batch["status"] == "cancelled" and batch["request_counts"]["completed"] < 20

    served(tmp_path, test, client)


def test_files_and_batches_of_another_key_are_not_there(tmp_path: Path) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        mine, other = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("alpha", "beta"))
        file = await uploaded(http, lines(line(0)), **mine)
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        assert (await http.post("/v1/batches", json=body, **other)).status_code == 404
        batch = await ended(http, (await http.post("/v1/batches", json=body, **mine)).json()["id"], **mine)
        paths = [
            f"/v1/files/{file}",
            f"/v1/files/{file}/content",
            f"/v1/files/{batch['output_file_id']}",
            f"/v1/batches/{batch['id']}",
        ]
        assert [(await http.get(path, **other)).status_code for path in paths] == [404] * 4
        assert (await http.delete(paths[0], **other)).status_code == 404
        assert (
            (await http.get("/v1/files", **other)).json()["data"] == [] == (await http.get("/v1/batches", **other)).json()["data"]
        )

    served(tmp_path, test, api_keys=("alpha", "beta"))


def test_ids_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "secret.data").write_text("secret")

    async def test(http: httpx.AsyncClient) -> None:
        for id in ("secret", "..%2Fsecret", "file-%2e%2e", "file-" + "0" * 32):
            for path in (f"/v1/files/{id}", f"/v1/files/{id}/content", f"/v1/batches/{id}"):
                assert (await http.get(path)).status_code == 404

    served(tmp_path / "files", test)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "1 to"),
        (b"{}\n", "line 1"),
        (lines(line(0), line(0)), "custom_id of its own"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(tmp_path: Path, data: bytes, word: str) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        file = await uploaded(http, data)
        answer = await http.post("/v1/batches", json={"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"})
        assert answer.status_code == 400 and word in answer.json()["error"]["message"]

    served(tmp_path, test)


def test_without_a_folder_there_are_none() -> None:
    async def run() -> None:
        async with in_process(FakeClient()) as (http, _):
            answer = await http.get("/v1/batches")
            assert answer.status_code == 404 and "--files" in answer.json()["error"]["message"]

    asyncio.run(run())


def test_forms_are_read() -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'
    assert form_fields("multipart/form-data; boundary=x", body) == {"a": ("", b"1")}
    assert form_fields("multipart/form-data; boundary=y", body) == {}
    assert form_fields("multipart/form-data", body) == {} == form_fields("application/json", b"{}")


def test_parts_are_taken_as_they_are_and_not_looked_into() -> None:
    inner = b"Content-Type: multipart/mixed; boundary=y\r\n\r\n--y\r\nContent-Type: message/rfc822\r\n\r\n" * 200
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n' + inner + b"\r\n--x--\r\n"
    assert form_fields("multipart/form-data; boundary=x", body) == {"file": ("f.jsonl", inner)}


async def started(http: httpx.AsyncClient, data: bytes, endpoint: str = CHAT, **options: Any) -> str:
    file = await uploaded(http, data, **options)
    body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
    answer = await http.post("/v1/batches", json=body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


@pytest.mark.parametrize("depth", [700, 900, 940])
def test_a_line_that_fails_inside_the_server_stops_no_other(tmp_path: Path, depth: int) -> None:
    """Tools are repeated in the answer, which is nested deeper than the request."""
    responses = "/v1/responses"
    tool = json.dumps({"type": "function", "name": "f", "parameters": "NESTED"})
    tool = tool.replace('"NESTED"', '{"a":' * depth + "{}" + "}" * depth)
    good = {"custom_id": "good", "method": "POST", "url": responses, "body": {"input": "Hello"}}
    bad = f'{{"custom_id": "bad", "method": "POST", "url": "{responses}", "body": {{"input": "Hello", "tools": [{tool}]}}}}\n'

    files = FileStore(tmp_path, write_atomically)
    file = files.put("", "in.jsonl", "batch", bad.encode() + lines(good))
    batch = new_batch("", responses, file.id, 2, None)
    BatchStore(files).save(batch)

    async def test(http: httpx.AsyncClient) -> None:
        first = await ended(http, batch.id)
        counts = first["request_counts"]
        # How much of the recursion limit the test's own calls take differs: the file may be unreadable as a whole at the greatest depth.
        assert counts["completed"] + counts["failed"] == 2 or (first["status"] == "failed" and depth > 900)
        assert (await ended(http, await started(http, lines(line(0)))))["request_counts"]["completed"] == 1

    client = FakeClient()
    served(tmp_path, test, client)
    assert client.closed


def test_a_disk_that_is_full_fails_the_batch_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(BatchStore, "partial", lambda *_: Path("/dev/full"))
            patched.setattr(BatchStore, "_lines", lambda *_: [])
            patched.setattr(BatchStore, "drop_half_line", lambda *_: None)
            assert (await ended(http, await started(http, lines(line(0), line(1)))))["status"] == "failed"
        assert (await ended(http, await started(http, lines(line(0)))))["status"] == "completed"

    served(tmp_path, test)


class FailingClient(FakeClient):
    """One prompt is more than it can take."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        if request.max_tokens == 3:
            raise ZeroDivisionError("secret")
        async for delta in super().generate(request):
            yield delta


def test_an_unforeseen_error_is_the_result_of_its_line(tmp_path: Path) -> None:
    client = FailingClient()

    async def run() -> None:
        async with in_process(client, files_folder=str(tmp_path)) as (http, service):
            batch = await ended(http, await started(http, lines(*(line(number) for number in range(6)))))
            assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
            [failed] = map(json.loads, (await http.get(f"/v1/files/{batch['error_file_id']}/content")).text.splitlines())
            assert failed["custom_id"] == "c2" and failed["response"]["status_code"] == 500 and "secret" not in str(failed)
            logged = [text for text in service.log.lines if "ZeroDivisionError" in text]  # type: ignore[attr-defined]
            assert len(logged) == 1 and "secret" not in logged[0]

    asyncio.run(run())
    assert client.closed


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_a_key_that_is_removed_leaves_its_files_to_nobody(tmp_path: Path) -> None:
    found: list[str] = []

    async def before(http: httpx.AsyncClient) -> None:
        found.append(await uploaded(http, lines(line(0)), **bearer("alpha")))

    async def after(http: httpx.AsyncClient) -> None:
        assert (await http.get(f"/v1/files/{found[0]}/content", **bearer("beta"))).status_code == 404
        assert (await http.get("/v1/files", **bearer("beta"))).json()["data"] == []

    served(tmp_path, before, api_keys=("alpha", "beta"))
    served(tmp_path, after, api_keys=("beta",))


@pytest.mark.parametrize(
    ("keys", "status"),
    [
        ((ApiKey(name="b", key="beta"), ApiKey(name="a", key="alpha")), 200),
        ((ApiKey(name="b", key="beta"),), 401),
        ((ApiKey(name="a", key="alpha", expires=datetime(2020, 1, 1, tzinfo=UTC)),), 401),
        ((), 401),
    ],
)
def test_a_batch_runs_as_its_owner(tmp_path: Path, keys: tuple[ApiKey, ...], status: int) -> None:
    """The server was stopped and has other keys now."""
    files = FileStore(tmp_path, write_atomically)
    store = BatchStore(files)
    batch = new_batch("a", CHAT, files.put("a", "in.jsonl", "batch", lines(line(0))).id, 1, None)
    store.save(batch)

    async def run() -> None:
        async with in_process(FakeClient(), files_folder=str(tmp_path), api_keys=keys) as (_, service):
            async with asyncio.timeout(HUNG_SECONDS):
                while (done := store.get("a", batch.id)) is None or done.status == "in_progress":
                    await asyncio.sleep(0.01)
            id = done.output_file_id if status == 200 else done.error_file_id
            assert json.loads(files.data(id).read_bytes())["response"]["status_code"] == status
            charged = {key.name: service.metrics.key_requests.labels(key.name)._value.get() for key in keys}
            assert charged == {key.name: float(status == 200 and key.name == "a") for key in keys}

    asyncio.run(run())


def test_a_shutdown_drops_no_line(tmp_path: Path) -> None:
    ids: list[str] = []

    async def run() -> None:
        client = FakeClient(hold_after=0)
        async with in_process(client, files_folder=str(tmp_path), drain_seconds=0.01) as (http, service):
            ids.append(await started(http, lines(line(0), line(1))))
            async with asyncio.timeout(HUNG_SECONDS):
                while client.running < 2:
                    await asyncio.sleep(0.01)
                await service.drain()
                while len(service.in_flight):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)

    async def test(http: httpx.AsyncClient) -> None:
        assert (await ended(http, ids[0]))["request_counts"] == {"total": 2, "completed": 2, "failed": 0}

    asyncio.run(run())
    served(tmp_path, test)


def test_the_limit_of_a_key_holds_for_its_batches_and_for_no_other(tmp_path: Path) -> None:
    keys = (ApiKey(name="a", key="alpha", requests_per_minute=2), ApiKey(name="b", key="beta"))
    client = FakeClient()

    async def test(http: httpx.AsyncClient) -> None:
        limited = await started(http, lines(*(line(number) for number in range(8))), **bearer("alpha"))
        other = await started(http, lines(*(line(number) for number in range(8))), **bearer("beta"))
        assert (await ended(http, other, **bearer("beta")))["request_counts"]["completed"] == 8
        shown = (await http.get(f"/v1/batches/{limited}", **bearer("alpha"))).json()
        assert shown["status"] == "in_progress" and shown["request_counts"]["completed"] == 2
        assert len(client.requests) == 10
        await http.post(f"/v1/batches/{limited}/cancel", **bearer("alpha"))
        assert (await ended(http, limited, **bearer("alpha")))["status"] == "cancelled"

    served(tmp_path, test, client, api_keys=keys)


def test_batches_of_one_owner_are_worked_off_in_turn(tmp_path: Path) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        ids = [await started(http, lines(line(0), line(1))) for _ in range(5)]
        assert {(await ended(http, id))["status"] for id in ids} == {"completed"}

    served(tmp_path, test)


class CrashingClient(FakeClient):
    """One prompt ends the engine's process, and with it all answers."""

    def __init__(self, times: int) -> None:
        super().__init__(seconds=0.001)
        self.times = times

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        deltas = super().generate(request)
        async with aclosing(deltas):
            async for delta in deltas:
                if request.max_tokens == 3 and self.times:
                    self.times -= 1
                    self.crash()
                yield delta


@pytest.mark.parametrize(("times", "failed"), [(1, 0), (1000, 1)])
def test_a_line_that_ends_the_engine_twice_fails_alone(tmp_path: Path, times: int, failed: int) -> None:
    client = CrashingClient(times)

    async def test(http: httpx.AsyncClient) -> None:
        batch = await ended(http, await started(http, lines(*(line(number) for number in range(8)))))
        assert batch["request_counts"] == {"total": 8, "completed": 8 - failed, "failed": failed}
        if failed:
            [found] = map(json.loads, (await http.get(f"/v1/files/{batch['error_file_id']}/content")).text.splitlines())
            assert found["custom_id"] == "c2" and found["response"]["status_code"] == 500

    served(tmp_path, test, client)
    assert client.starts == min(times, 2) + 1


def test_batches_of_earlier_versions_are_read(tmp_path: Path) -> None:
    store = BatchStore(FileStore(tmp_path, write_atomically))
    batch = new_batch("a", CHAT, "file-" + "0" * 32, 1, None)
    store.save(batch)
    path = tmp_path / f"{batch.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": 2}))
    found = store.get("a", batch.id)
    assert found is not None and found.body == batch.body


def test_results_are_counted_once(tmp_path: Path) -> None:
    store = BatchStore(FileStore(tmp_path, write_atomically))
    batch = new_batch("", CHAT, "file-x", 4, None)
    fine, bad = b'{"custom_id": "a", "error": null}\n', b'{"custom_id": "b", "error": {"code": "400"}}\n'
    seen = b""
    for added, counts in ((fine, (1, 0)), (b"damaged\n" + bad, (1, 1)), (fine[:9], (1, 1)), (fine[9:], (2, 1))):
        seen += added
        store.partial(batch).write_bytes(seen)
        assert store.counts(batch) == counts == BatchStore(FileStore(tmp_path, write_atomically)).counts(batch)


def test_batches_that_ended_are_forgotten_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.tasks.serve.batch.batches.MAX_KEPT", 3)
    store = BatchStore(FileStore(tmp_path, write_atomically))
    for number in range(5):
        batch = new_batch("me", CHAT, "file-x", 1, None)
        status = "in_progress" if number in (0, 4) else "completed"
        store.save(msgspec.structs.replace(batch, created_at=number, status=status))
    store.save(msgspec.structs.replace(new_batch("you", CHAT, "file-x", 1, None), status="completed"))
    assert store.make_room("me") == 2
    assert sorted((batch.owner, batch.status, batch.created_at) for batch in store.all() if batch.owner == "me") == [
        ("me", "in_progress", 0),
        ("me", "in_progress", 4),
    ]
    assert sum(batch.owner == "you" for batch in store.all()) == 1


def test_content_comes_in_pieces_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.tasks.serve.batch.endpoints.PIECE_BYTES", 7)

    async def test(http: httpx.AsyncClient) -> None:
        for data in (b"", b"1234567", b"0123456789abcdef"):
            file = await uploaded(http, data)
            answer = await http.get(f"/v1/files/{file}/content")
            assert answer.content == data and answer.headers["content-length"] == str(len(data))

    served(tmp_path, test)


def test_who_has_too_many_files_starts_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        file = await uploaded(http, lines(line(0)))
        monkeypatch.setattr("windlass.tasks.serve.batch.files.MAX_FILES", 1)
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        assert (await http.post("/v1/batches", json=body)).status_code == 413

    served(tmp_path, test)
