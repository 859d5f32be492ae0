"""Adapters of one model, loaded and unloaded at run time.

Loading starts the model's engine anew, with the adapter: requests that run finish first, new ones wait as they do in a swap of models, and
none is lost. If the engine refuses the adapter, it is started as it was. Unloading takes the name away at once; the engine drops the
matrices with its next start.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from windlass.core.client import Client, Unavailable
from windlass.core.model import Frozen
from windlass.errors import BadInput, Error
from windlass.serve.lora.files import NAME, take_adapter
from windlass.serve.service import Service
from windlass.wire.schema.errors import ApiError

Adapters = tuple[tuple[str, str], ...]
MAX_ADAPTERS = 64
"""Of one model."""
BYTES_PER_FILE_BYTE = 2
"""Matrices are held in fp32, and published in 16 bits."""


class AdapterHost(Frozen):
    """What is needed to change a model's adapters."""

    reopen: Callable[[Adapters], Client]
    """A client of the model with these adapters."""
    check: Callable[[Path], str]
    """What is wrong with an adapter's files; empty: nothing. May take seconds."""


def refused(param: str, message: str) -> ApiError:
    return ApiError(f"{param} {message}", param=param, code="invalid_value")


class RuntimeAdapters:
    def __init__(self, service: Service, host: AdapterHost, root: Path, kept: Path) -> None:
        """`root`: where adapters may come from; `kept`: where their copies are."""
        self._service, self._host, self._root, self._kept = service, host, root, kept
        self._wanted: dict[str, str] = dict(service.adapters)
        self._opened = dict(self._wanted)
        """What the client was made with."""
        self._sizes: dict[str, int] = {}
        self._lock = asyncio.Lock()
        self._copies = 0
        service.slot.before_load = self._reopen

    async def load(self, name: str, path: str) -> None:
        async with self._lock:
            self._check_name(name)
            self._copies += 1
            folder = self._kept / str(self._copies) / name
            try:
                self._sizes[name] = await asyncio.to_thread(take_adapter, self._root, path, folder)
                problem = await asyncio.to_thread(self._host.check, folder)
            except BadInput as error:
                problem = str(error)
            if not problem:
                problem = await self._start_with(name, folder)
            if problem:
                await asyncio.to_thread(shutil.rmtree, folder.parent, ignore_errors=True)
                raise refused("lora_path", problem)
            self._service.adapters[name] = str(folder)

    async def unload(self, name: str) -> None:
        """Requests that have the adapter finish with it."""
        async with self._lock:
            if name not in self._service.adapters:
                raise ApiError("no such adapter is loaded", param="lora_name", code="not_found", status=404)
            del self._service.adapters[name], self._wanted[name]
            self._count_bytes()

    def _check_name(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise refused("lora_name", "should be letters, digits, dots, dashes and underscores, 64 at most, none of . - _ first")
        if any(one.knows(name) or one.knows(f"{one.model}:{name}") for one in self._service.group):
            raise refused("lora_name", "is served already; unload that one first, or choose another name")
        if len(self._service.adapters) >= MAX_ADAPTERS:
            raise refused("lora_name", f"is one too many: {MAX_ADAPTERS} adapters are loaded; unload one first")

    async def _start_with(self, name: str, folder: Path) -> str:
        """Starts the engine with one more adapter; what prevented it, and then it runs as before."""
        assert self._service.models is not None
        before = dict(self._wanted)
        self._wanted[name] = str(folder)
        self._count_bytes()

        def undo() -> None:
            self._wanted = before
            self._count_bytes()

        try:
            await self._service.models.reload(self._service.slot, undo)
        except BadInput as error:
            return str(error)
        except Error as error:
            return f"could not be loaded with the model: {error}"
        return ""

    def _count_bytes(self) -> None:
        sizes = (self._sizes.get(name, 0) for name in self._wanted)
        self._service.slot.adapter_bytes = BYTES_PER_FILE_BYTE * sum(sizes)

    async def _reopen(self) -> None:
        """Before the engine starts: a client with the adapters that are wanted now, and copies that nobody needs are removed."""
        if self._wanted == self._opened:
            return
        supervisor = self._service.supervisor
        old, wanted = supervisor.client, dict(self._wanted)
        try:
            supervisor.client = await asyncio.to_thread(self._host.reopen, tuple(wanted.items()))
        except (OSError, ValueError) as error:
            raise Unavailable(f"the model could not be opened again: {error}") from None
        gone = [Path(path) for path in self._opened.values() if path not in wanted.values()]
        self._opened = wanted
        await old.close()
        for path in gone:
            if path.is_relative_to(self._kept):
                await asyncio.to_thread(shutil.rmtree, path.parent, ignore_errors=True)
