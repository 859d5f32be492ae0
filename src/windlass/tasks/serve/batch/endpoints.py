"""`/v1/files` and `/v1/batches`. Each key sees its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from contextlib import contextmanager
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any, Literal

from starlette.types import Receive, Scope, Send

from windlass.errors import DoesNotFit
from windlass.tasks.serve.api.adapters import MakeJob, chat_job, completion_job
from windlass.tasks.serve.api.caller import caller_of
from windlass.tasks.serve.api.endpoints import ready_body, send_json
from windlass.tasks.serve.api.translations import responses_job
from windlass.tasks.serve.batch.batches import MAX_LINES, MAX_OPEN, Batch, BatchStore, new_batch, read_lines
from windlass.tasks.serve.batch.files import FileStore, StoredFile
from windlass.tasks.serve.batch.runner import BatchRunner
from windlass.tasks.serve.http.asgi import request_header, response_start
from windlass.tasks.serve.service import Service
from windlass.wire.decode import decode
from windlass.wire.schema.errors import ApiError, invalid
from windlass.wire.schema.structs import RequestStruct

ENDPOINTS: dict[str, MakeJob] = {
    "/v1/chat/completions": chat_job,
    "/v1/completions": completion_job,
    "/v1/responses": responses_job,
}


MAX_PARTS = 16
PIECE_BYTES = 2**18
MAX_PART_HEAD_BYTES = 4096


class BatchRequest(RequestStruct, kw_only=True):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class Batching:
    """What the endpoints share, if the server has a folder for files."""

    def __init__(self, service: Service, files: FileStore) -> None:
        self.files, self.batches = files, BatchStore(files)
        self.runner = BatchRunner(service, files, self.batches, ENDPOINTS)


def _batching(service: Service) -> Batching:
    found: Any = service.batching
    if found is None:
        raise ApiError("this server has no folder for files; start it with --files DIR", code="not_found", status=404)
    return found


def _owner(service: Service, scope: Scope) -> str:
    number = caller_of(scope).key
    return service.keys[number - 1].name if number else ""


# --- files -----------------------------------------------------------------------------------------------------------


async def upload(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    batching, owner = _batching(service), _owner(service, scope)
    body = await ready_body(service, scope, receive)
    fields = form_fields(request_header(scope, b"content-type") or "", body)
    name, data = fields.get("file", ("", b""))
    if "file" not in fields:
        raise invalid("file", "is missing; send multipart/form-data")
    if fields.get("purpose", ("", b""))[1] != b"batch":
        raise invalid("purpose", "should be batch")
    await _check_room(batching, owner, len(data))
    with disk_errors():
        stored = await asyncio.to_thread(batching.files.put, owner, name or "file", "batch", data)
    await send_json(send, stored.body)


async def _check_room(batching: Batching, owner: str, num_bytes: int = 0) -> None:
    if not await asyncio.to_thread(batching.files.has_room, owner, num_bytes):
        raise ApiError("too many files are stored; delete some", code="too_many_files", status=413)


@contextmanager
def disk_errors() -> Generator[None]:
    """A full disk is the operator's to mend, and no engine's fault."""
    try:
        yield
    except DoesNotFit:
        raise ApiError(
            "the server's disk is full: nothing was stored; delete files, or ask its operator for room",
            code="disk_full",
            status=507,
            type="server_error",
        ) from None


def form_fields(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """Name -> file name and content. Split by hand: email's parser would follow whatever parts claim to contain."""
    head = Message()
    head["content-type"] = content_type.replace("\r", "").replace("\n", "")
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        return {}
    found: dict[str, tuple[str, bytes]] = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), MAX_PARTS)[1:]:
        headers, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if len(headers) > MAX_PART_HEAD_BYTES:
            continue
        parsed = BytesParser(policy=HTTP).parsebytes(headers + b"\r\n\r\n", headersonly=True)
        name: Any = parsed.get_param("name", header="content-disposition")
        if isinstance(name, str):
            found[name] = (parsed.get_filename() or "", content)
    return found


async def list_files(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    files = await asyncio.to_thread(_batching(service).files.of, _owner(service, scope))
    await send_json(send, {"object": "list", "data": [file.body for file in reversed(files)], "has_more": False})


async def get_file(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, _file(service, scope).body)


async def file_content(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """In pieces, each read when the client has taken the one before: results of a batch may be large, and many may ask for them."""
    path = _batching(service).files.data(_file(service, scope).id)
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        await send(response_start(200, b"application/octet-stream", left))
        while left:
            piece = await asyncio.to_thread(file.read, min(left, PIECE_BYTES))
            left = left - len(piece) if piece else 0
            await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
        if not os.fstat(file.fileno()).st_size:
            await send({"type": "http.response.body", "body": b""})


async def delete_file(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    file = _file(service, scope)
    _batching(service).files.delete(file.owner, file.id)
    await send_json(send, {"id": file.id, "object": "file", "deleted": True})


def _file(service: Service, scope: Scope) -> StoredFile:
    found = _batching(service).files.get(_owner(service, scope), scope["path_params"]["id"])
    if found is None:
        raise _unknown("file")
    return found


def _unknown(what: str, param: str | None = None) -> ApiError:
    return ApiError(
        f"{what} not found: it does not exist, was deleted, or is another key's", param=param, code="not_found", status=404
    )


# --- batches ---------------------------------------------------------------------------------------------------------


async def create(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    batching, owner = _batching(service), _owner(service, scope)
    body = decode(await ready_body(service, scope, receive), BatchRequest)
    file = batching.files.get(owner, body.input_file_id)
    if file is None:
        raise _unknown("file", "input_file_id")
    await _check_room(batching, owner)
    try:
        lines = await asyncio.to_thread(read_lines, batching.files.data(file.id))
    except ValueError as error:
        raise invalid("input_file_id", f"names a file of which {error}") from None
    ids = {line.custom_id for line in lines}
    if not lines or len(lines) > MAX_LINES or len(ids) != len(lines):
        raise invalid(
            "input_file_id", f"names a file that should have 1 to {MAX_LINES:,} lines, each with a custom_id of its own"
        )
    if await asyncio.to_thread(batching.batches.make_room, owner) >= MAX_OPEN:
        raise ApiError(
            f"{MAX_OPEN} batches are unfinished; wait for one", code="rate_limit_exceeded", status=429
        ).with_retry_after(60)
    batch = new_batch(owner, body.endpoint, file.id, len(lines), body.metadata)
    with disk_errors():
        batching.batches.save(batch)
    batching.runner.wake()
    await send_json(send, batch.body)


async def get(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, await _current(service, _batch(service, scope)))


async def list_batches(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    owner = _owner(service, scope)
    batches = await asyncio.to_thread(_batching(service).batches.all)
    own = [await _current(service, batch) for batch in batches if batch.owner == owner]
    ids = [batch["id"] for batch in own] or [None]
    await send_json(send, {"object": "list", "data": own[::-1], "first_id": ids[-1], "last_id": ids[0], "has_more": False})


async def cancel(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    batch = _batch(service, scope)
    if batch.status == "in_progress":
        _batching(service).runner.cancel(batch.id)
    shown = await _current(service, batch)
    await send_json(send, {**shown, "status": "cancelling"} if batch.status == "in_progress" else shown)


def _batch(service: Service, scope: Scope) -> Batch:
    found = _batching(service).batches.get(_owner(service, scope), scope["path_params"]["id"])
    if found is None:
        raise _unknown("batch")
    return found


async def _current(service: Service, batch: Batch) -> dict[str, Any]:
    """With the counts so far."""
    if batch.status != "in_progress":
        return batch.body
    completed, failed = await asyncio.to_thread(_batching(service).batches.counts, batch)
    return {**batch.body, "request_counts": {"total": batch.total, "completed": completed, "failed": failed}}
