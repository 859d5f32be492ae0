"""Works off batches, of each owner one after another, a few requests at a time, and only while the engine has room: batches are cheap
because others come first. They have a share of the engine of their own. Limits of a key hold for its batches too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Any, cast
from uuid import uuid4

import msgspec

from windlass.core.client import Busy, Unavailable
from windlass.core.request import Delta, Usage
from windlass.errors import Error
from windlass.foreign import is_failure
from windlass.tasks.serve.api.adapters import GenerationJob, MakeJob, expected_tokens
from windlass.tasks.serve.api.caller import Caller
from windlass.tasks.serve.api.model_switch import named_model, service_for
from windlass.tasks.serve.backend.merge import merge_streams
from windlass.tasks.serve.batch.batches import MAX_OUTPUT_BYTES, Batch, BatchLine, BatchStore, read_lines
from windlass.tasks.serve.batch.files import FileStore
from windlass.tasks.serve.http.errors import generation_failed, key_expired, to_api_error, unauthorized
from windlass.tasks.serve.monitor.log import error_location
from windlass.tasks.serve.service import Service
from windlass.wire.schema.errors import ApiError, renamed

AT_ONCE = 4
"""Requests of all batches, and those of each batch that wait."""
WAIT_SECONDS = 0.25
MAX_ENGINE_FAILURES = 2
"""While one line ran; then it is taken for the cause."""
SHARE = "batches"
BATCH_PRIORITY = 2
TOO_MUCH_OUTPUT = f"the output of the batch has reached {MAX_OUTPUT_BYTES // 2**20} MiB; divide it into several"
MAX_DEPTH = 256
"""By which a result may be nested further: it is read again below other calls, and all of them share Python's recursion limit."""


class BatchRunner:
    def __init__(self, service: Service, files: FileStore, store: BatchStore, endpoints: dict[str, MakeJob]) -> None:
        self._service, self._files, self._store, self._endpoints = service, files, store, endpoints
        self._new = asyncio.Event()
        self._cancelled: set[str] = set()
        self._busy_owners: set[str] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._suspect = asyncio.Lock()

    def wake(self) -> None:
        self._new.set()

    def cancel(self, id: str) -> None:
        self._cancelled.add(id)
        self._new.set()

    async def run(self) -> None:
        """Until cancelled. Owners do not wait for each other: one may have used up its limit for the day."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._new.clear()
                for batch in await asyncio.to_thread(self._store.all):
                    if batch.status == "in_progress" and batch.owner not in self._busy_owners:
                        self._busy_owners.add(batch.owner)
                        tasks.create_task(self._work_or_fail(batch))
                await self._new.wait()

    async def _work_or_fail(self, batch: Batch) -> None:
        """Whatever goes wrong in one batch must not stop the others."""
        try:
            await self._work(batch)
        except Exception as error:  # noqa: BLE001 - a full disk, a file that is gone
            self._log_error("batch failed", error)
            with suppress(Exception):
                self._store.save(msgspec.structs.replace(batch, status="failed"))
            await asyncio.sleep(WAIT_SECONDS)
        finally:
            self._busy_owners.discard(batch.owner)
            self._new.set()

    def _log_error(self, what: str, error: BaseException) -> None:
        """Without its message, which may quote a request."""
        while isinstance(error, ExceptionGroup):
            error = cast("ExceptionGroup[Exception]", error).exceptions[0]
        self._service.log.line(f"{what}: {type(error).__name__} in {error_location(error)}")

    async def _work(self, batch: Batch) -> None:
        done = await asyncio.to_thread(lambda: {found.custom_id for found, _ in self._store.results(batch)})
        lines = await asyncio.to_thread(read_lines, self._files.data(batch.input_file_id))
        todo = [line for line in lines if line.custom_id not in done]
        self._store.drop_half_line(batch)
        slots = asyncio.Semaphore(AT_ONCE)

        with self._store.partial(batch).open("ab") as out:

            def write(line: BatchLine, result: bytes) -> None:
                if out.tell() + len(result) > MAX_OUTPUT_BYTES:
                    result = _refused(line, ApiError(TOO_MUCH_OUTPUT, code="output_too_large", status=413))
                out.write(result + b"\n")
                out.flush()

            async with asyncio.TaskGroup() as tasks:
                for line in todo:
                    await slots.acquire()
                    if batch.id in self._cancelled:
                        break
                    tasks.create_task(self._one(batch, line, write)).add_done_callback(lambda _: slots.release())
        is_cancelled = batch.id in self._cancelled
        is_whole = sum(await asyncio.to_thread(self._store.counts, batch)) >= len(lines)
        if not is_whole and not is_cancelled:  # a shutdown has cancelled lines: the next start goes on
            await asyncio.sleep(WAIT_SECONDS)
            return
        self._cancelled.discard(batch.id)
        await asyncio.to_thread(self._store.finish, batch, "cancelled" if is_cancelled else "completed")

    async def _one(self, batch: Batch, line: BatchLine, write: Callable[[BatchLine, bytes], None]) -> None:
        is_counted, num_failures = False, 0
        while batch.id not in self._cancelled:
            await self._room()
            try:
                if not is_counted:  # once, however often the engine is full
                    self._service.check_quota(self._key(batch.owner))
                    is_counted = True
                # Lines during which the engine failed are tried again one at a time: the cause must not take others with it twice.
                async with self._suspect if num_failures else self._slots:
                    result = _result(line, 200, await self._answer(batch, line), None)
            except Busy:
                await asyncio.sleep(WAIT_SECONDS)
                continue
            except Unavailable:
                num_failures += 1
                if num_failures < MAX_ENGINE_FAILURES:
                    await self._engine_again()
                    continue
                self._service.supervisor.check_now()
                result = _refused(line, generation_failed())
            except ApiError as refusal:
                if refusal.status in (429, 503):  # not this request's fault
                    await asyncio.sleep(WAIT_SECONDS)
                    continue
                result = _refused(line, refusal)
            except BaseException as error:
                if not is_failure(error):
                    raise
                self._log_error("a line of a batch failed", error)
                result = _refused(line, to_api_error(error))
            write(line, result)
            return

    async def _engine_again(self) -> None:
        """Until it has answered a probe: an engine that stays away for a while is no line's fault."""
        supervisor = self._service.supervisor
        last = supervisor.info
        supervisor.check_now()
        while supervisor.info is last:
            await asyncio.sleep(WAIT_SECONDS)

    async def _answer(self, batch: Batch, line: BatchLine) -> Any:
        if line.url != batch.endpoint:
            raise ApiError(f"url is not the batch's endpoint {batch.endpoint}", param="url")
        raw = bytes(line.body)
        service = service_for(self._service.group, named_model(raw))
        if service.models is None:
            return await self._answer_by(service, raw, line.url, self._key(batch.owner))
        async with service.models.using(service.slot):
            return await self._answer_by(service, raw, line.url, self._key(batch.owner))

    async def _answer_by(self, service: Service, raw: bytes, url: str, key: int) -> Any:
        job = None
        try:
            caller = Caller(key=key, address=SHARE)
            job = cheap(await service.body_reader.parsed(raw, lambda raw: self._endpoints[url](service, raw, caller)))
            held = service.quotas.holding(key, expected_tokens(job, len(raw)))
            with held, service.admitted(len(job.requests), SHARE, is_timed=False):
                return await self._generate(service, job, key)
        except (ApiError, Unavailable):
            raise
        except Error as error:
            raise renamed(service.api_error(error, job.body if job else None), job.params if job else {}) from None

    def _key(self, owner: str) -> int:
        """The number of its key now: keys may have been added or removed since."""
        keys = self._service.keys
        if not owner and not keys:
            return 0
        number = next((number for number, key in enumerate(keys, 1) if key.name == owner), None)
        if number is None:
            raise unauthorized()
        if keys[number - 1].is_expired(datetime.now(UTC)):
            raise key_expired()
        return number

    async def _generate(self, service: Service, job: GenerationJob, key: int) -> Any:
        choices: list[list[Delta]] = [[] for _ in job.requests]
        async with aclosing(merge_streams(service.client, job.requests)) as arriving:
            async for arrived in arriving:
                for index, delta in arrived:
                    choices[index].append(delta)
        usages: list[Usage] = [deltas[-1].usage for deltas in choices if deltas[-1].usage is not None]
        self._service.charge(key, usages)
        return msgspec.json.decode((await job.writer()).whole(choices))

    async def _room(self) -> None:
        """Until at most half of the engine is busy with other requests."""
        while not self._has_room():
            await asyncio.sleep(WAIT_SECONDS)

    def _has_room(self) -> bool:
        """Of several models, all that are loaded must have room: a batch does not take a busy one's place."""
        loaded = [one for one in self._service.group if one.supervisor.info is not None]
        is_ready = self._service.supervisor.is_ready or self._service.models is not None
        if self._service.draining.is_set() or not is_ready or not (loaded or self._service.models is not None):
            return False
        return all(_others(one) <= _most_running(one) // 2 for one in loaded)


def _others(service: Service) -> int:
    return service.in_flight.num_sequences - service.in_flight.by_share[SHARE]


def _most_running(service: Service) -> int:
    info = service.supervisor.info
    return info.max_sequences if info is not None else 0


def cheap(job: GenerationJob) -> GenerationJob:
    """Others are served first."""
    requests = [msgspec.structs.replace(one, priority=max(one.priority, BATCH_PRIORITY)) for one in job.requests]
    return msgspec.structs.replace(job, requests=requests)


def _refused(line: BatchLine, refusal: ApiError) -> bytes:
    return _result(line, refusal.status, msgspec.json.decode(refusal.body), str(refusal))


def _result(line: BatchLine, status: int, body: Any, error: str | None) -> bytes:
    """Raises RecursionError if it is nested too deeply to be read again."""
    response = {"status_code": status, "request_id": f"req_{uuid4().hex}", "body": body}
    result = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None if error is None else {"code": str(status), "message": error},
    }
    data = msgspec.json.encode(result)
    msgspec.json.decode(b"[" * MAX_DEPTH + data + b"]" * MAX_DEPTH)
    return data
