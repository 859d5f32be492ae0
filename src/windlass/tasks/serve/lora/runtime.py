"""Adapters of one model, loaded and unloaded at run time.

An adapter goes into the engine that runs, where that can take it: requests go on. Otherwise (the layout of the Hopper kernels, no memory
beside other models, no engine at the moment) the engine is started anew with it: requests that run finish first, new ones wait as they do
in a swap of models, and none is lost. If the engine refuses the adapter, it is started as it was. Unloading takes the name away at once;
the engine drops the matrices when the last request that has them ends.

The engine knows each adapter by a name that is never used again: requests of an unloaded adapter, and cached prefixes, have nothing to do
with another one of the same name.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from windlass.core.client import Client, Unavailable
from windlass.core.model import Frozen
from windlass.errors import BadInput, Error, Impossible
from windlass.tasks.serve.lora.files import NAME, take_adapter
from windlass.tasks.serve.service import Service
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
        """By the engine's names."""
        self._opened = dict(self._wanted)
        """What the client starts engines with."""
        self._sizes: dict[str, int] = {}
        self._lock = asyncio.Lock()
        self._copies = 0
        self._leaving: set[asyncio.Task[None]] = set()
        service.slot.before_load = self._reopen

    async def load(self, name: str, path: str) -> str:
        """Returns why the engine had to be started for it; empty: it went into the one that runs."""
        async with self._lock:
            self._check_name(name)
            self._copies += 1
            key, folder = f"{name}@{self._copies}", self._kept / str(self._copies) / name
            problem = why = ""
            try:
                self._sizes[key] = await asyncio.to_thread(take_adapter, self._root, path, folder)
                problem = await asyncio.to_thread(self._host.check, folder)
                why = problem or await self._add(key, str(folder))
            except BadInput as error:
                problem = str(error)
            if not problem and why:
                problem = await self._start_with(key, folder)
            if problem:
                self._sizes.pop(key, None)
                self._count_bytes()
                await asyncio.to_thread(shutil.rmtree, folder.parent, ignore_errors=True)
                raise refused("lora_path", problem)
            self._service.adapters[name], self._service.adapter_keys[name] = str(folder), key
            return why

    async def unload(self, name: str) -> bool:
        """Requests that have the adapter finish with it. Returns whether the engine that runs gives its memory back then."""
        async with self._lock:
            if name not in self._service.adapters:
                raise ApiError("no such adapter is loaded", param="lora_name", code="not_found", status=404)
            key = self._service.adapter_keys.pop(name, name)
            del self._service.adapters[name], self._wanted[key]
            self._count_bytes()
            remove = self._engine_can("remove_adapter")
            if remove is None:
                return False
            task = asyncio.create_task(self._remove(key, remove))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            return True

    def _engine_can(self, what: str) -> Callable[..., Awaitable[None]] | None:
        """What the engine that runs may be asked to do."""
        return getattr(self._service.supervisor.client, what, None) if self._service.slot.is_open else None

    async def _add(self, key: str, folder: str) -> str:
        """Puts an adapter into the engine that runs. Returns why that cannot be; raises BadInput if no engine can have it."""
        slot, models = self._service.slot, self._service.models
        assert models is not None
        add = self._engine_can("add_adapter")
        if add is None:
            return "the model was not loaded"
        self._wanted[key] = folder
        self._count_bytes()
        try:
            if not models.has_room(slot):
                return "there was no memory for it beside other models"
            async with models.using(slot):
                await add(key, folder)
        except Impossible as error:
            return str(error)
        except BadInput:
            del self._wanted[key]
            raise
        except Error as error:
            return str(error)
        self._opened[key] = folder
        return ""

    async def _remove(self, key: str, remove: Callable[..., Awaitable[None]]) -> None:
        """If its engine is lost before: with the next start."""
        with suppress(Error):
            await remove(key)
            folder = self._opened.pop(key, None)
            if folder is not None:
                await self._forget([Path(folder)])

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
        before = {key: path for key, path in self._wanted.items() if key != name}
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
        await self._forget(gone)

    async def _forget(self, folders: list[Path]) -> None:
        for path in folders:
            if path.is_relative_to(self._kept):
                await asyncio.to_thread(shutil.rmtree, path.parent, ignore_errors=True)
