"""Opens a router.toml as a Client: servers over HTTP, models of this machine, other routers; those that do not fit together share a slot."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from windlass.core.client import Client
from windlass.core.launch import Launch
from windlass.errors import BadInput
from windlass.tasks.route.decide.router_file import read_router
from windlass.tasks.route.operate.arm import Arm
from windlass.tasks.route.operate.cascade import RunTests
from windlass.tasks.route.operate.client import RouterClient, check_budget
from windlass.tasks.route.operate.gate import GatedClient, SwapGate
from windlass.tasks.route.operate.log import DecisionLog
from windlass.tasks.route.operate.settings import ModelSettings, RouteSettings, check_models, read_settings

if TYPE_CHECKING:
    from windlass.tasks.evaluate.sandbox.sandbox import Sandbox

MAX_DEPTH = 4
"""Of routers inside routers: one that names itself would never end."""
Notify = Callable[[str], None]


def is_router(name: str) -> bool:
    return name.endswith(".toml")


def open_router(
    path: Path,
    launch: Launch = Launch(),  # noqa: B008 - frozen
    notify: Notify = lambda _: None,
    depth: int = 0,
    given: Mapping[str, str] = MappingProxyType({}),
    keep: int | None = None,
) -> RouterClient:
    """Models load with the first request. `launch`: how models of this machine are opened. `given` and `keep`: see `read_settings`."""
    if depth > MAX_DEPTH:
        raise BadInput(f"{path}: routers are nested more than {MAX_DEPTH} deep; does one name itself?")
    settings = read_settings(path, given, keep)
    router = read_router(path.parent / settings.router)
    check_models(settings, router, path.name)
    check_budget(settings, router)
    known = {model.name: model for model in router.models}
    clients = _clients(settings, path.parent, launch, notify, depth)
    arms: dict[str, Arm] = {}
    for one in settings.models:
        arm = Arm(one, known[one.name], clients[one.name], settings.breaker, time.monotonic)
        gated = clients[one.name]
        if isinstance(gated, GatedClient):
            arm.is_loaded = lambda gated=gated: gated.is_loaded
            arm.enter = gated.enter
        arms[one.name] = arm
    log = DecisionLog(path.parent / settings.log if settings.log else None)
    gate = next((client.gate for client in clients.values() if isinstance(client, GatedClient)), None)
    return RouterClient(router, settings, arms, log, _run_tests(settings), notify, gate=gate)


def _clients(settings: RouteSettings, folder: Path, launch: Launch, notify: Notify, depth: int) -> dict[str, Client]:
    """Models that are not resident share one slot."""
    openers: dict[str, Callable[[], Awaitable[Client]]] = {}
    for one in settings.models:
        if not one.resident:
            openers[one.name] = _opener(one, folder, launch, notify, depth)
    gate = SwapGate(openers, settings.max_wait_seconds)
    return {
        one.name: _client(one, folder, launch, notify, depth) if one.resident else GatedClient(gate, one.name)
        for one in settings.models
    }


def _opener(one: ModelSettings, folder: Path, launch: Launch, notify: Notify, depth: int) -> Callable[[], Awaitable[Client]]:
    async def opened() -> Client:
        client = await asyncio.to_thread(_client, one, folder, launch, notify, depth)
        await client.info()  # loads it
        return client

    return opened


def _client(one: ModelSettings, folder: Path, launch: Launch, notify: Notify, depth: int) -> Client:
    if one.at.startswith(("http://", "https://")):
        from windlass.wire.client.http_client import HttpClient

        url, _, model = one.at.partition("#")
        return HttpClient(url, api_key=_key(one), model=model or None)
    if is_router(one.at):
        return open_router(folder / one.at, launch, notify, depth + 1)
    return _local(one, launch)


def _key(one: ModelSettings) -> str | None:
    if not one.api_key_env:
        return None
    found = os.environ.get(one.api_key_env)
    if not found:
        raise BadInput(f"model {one.name} needs its API key in the environment variable {one.api_key_env}, which is not set")
    return found


def _local(one: ModelSettings, launch: Launch) -> Client:
    import msgspec

    from windlass.open.client import open_client, require_torch
    from windlass.open.compile import compile_kernels
    from windlass.open.resolve import model_files

    require_torch(f"running {one.name} on this machine")
    compile_kernels(shown=False, device=launch.device)
    return open_client(msgspec.structs.replace(launch, model=str(model_files(one.at, shown=False))))


def _run_tests(settings: RouteSettings) -> RunTests | None:
    """The sandbox of `windlass eval`, made with its first program."""
    if settings.cascade is None or not settings.cascade.tests:
        return None
    from windlass.tasks.evaluate.sandbox.sandbox import Program, Sandbox

    kept: list[Sandbox] = []

    async def run(source: str, tests: str) -> bool:
        if not kept:
            kept.append(Sandbox())
            await kept[0].check()
        return (await kept[0].run(Program(source=source, tests=tests))).passed

    return run
