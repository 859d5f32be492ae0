"""Opens what is evaluated: a model on this machine, or a server. Closing gives back its memory, which is checked."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from windlass.cli.eval.options import EvalOptions
from windlass.core.client import Client
from windlass.core.model import Frozen
from windlass.core.request import Info
from windlass.errors import BadInput, Error
from windlass.tasks.evaluate.run.capacity import server_concurrency, top_logprobs
from windlass.tasks.evaluate.run.estimate import Speed
from windlass.tasks.evaluate.run.settings import folder_name

LOCAL_CONCURRENCY = 16
GIVEN_BACK_BYTES = 16 * 2**20
"""What processes of this one may hold when a model was closed: an engine has a process of its own, so nothing should be left."""


class OpenModel(Frozen):
    client: Client
    info: Info
    label: str
    weights: str
    """Digest; empty for a server."""
    concurrency: int
    top: int
    speed: Speed
    url: str = ""


def is_server(name: str) -> bool:
    return name.startswith(("http://", "https://"))


@asynccontextmanager
async def opened(name: str, options: EvalOptions) -> AsyncGenerator[OpenModel]:
    made = await (
        _server(name, options) if is_server(name) else _router(name, options) if name.endswith(".toml") else _local(name, options)
    )
    try:
        yield made
    finally:
        await made.client.close()


async def _server(name: str, options: EvalOptions) -> OpenModel:
    from windlass.wire.client.http_client import HttpClient

    url, _, model = name.partition("#")
    timeout = options.deadline_seconds
    client = HttpClient(url, api_key=options.api_key, model=model or None, timeout=timeout, streams=False)
    try:
        info = await client.info()
        concurrency = options.concurrency or await server_concurrency(url, options.api_key)
    except BaseException:
        await client.close()
        raise
    speed = Speed(watts=options.watts)
    return OpenModel(
        client=client,
        info=info,
        label=info.model,
        weights="",
        concurrency=concurrency,
        top=top_logprobs(info),
        speed=speed,
        url=url,
    )


async def _router(name: str, options: EvalOptions) -> OpenModel:
    """A router is a Client like any other."""
    from windlass.open.route import open_router

    client = open_router(Path(name), options.launch)
    try:
        info = await client.info()
    except BaseException:
        await client.close()
        raise
    concurrency = options.concurrency or LOCAL_CONCURRENCY
    speed = Speed(watts=options.watts)
    return OpenModel(
        client=client, info=info, label=Path(name).stem, weights="", concurrency=concurrency, top=top_logprobs(info), speed=speed
    )


async def _local(name: str, options: EvalOptions) -> OpenModel:
    from windlass.open.client import open_client, require_torch
    from windlass.open.compile import compile_kernels
    from windlass.open.progress import ByteBar, byte_progress
    from windlass.open.resolve import runnable_files

    require_torch("evaluating a model of this machine")
    shown = not options.as_json
    path = runnable_files(name, shown)
    compile_kernels(shown, options.launch.device)
    concurrency = options.concurrency or LOCAL_CONCURRENCY
    launch = msgspec.structs.replace(options.launch, model=str(path), max_sequences=concurrency)
    with ExitStack() as bars:
        client = open_client(launch, ByteBar(bars.enter_context(byte_progress(f"loading {Path(path).name}", shown))))
        try:
            info = await client.info()
        except BaseException:
            await client.close()
            raise
    return OpenModel(
        client=client,
        info=info,
        label=info.model,
        weights=weights_digest(path),
        concurrency=min(concurrency, info.max_sequences),
        top=top_logprobs(info),
        speed=planned_speed(name, options, concurrency),
    )


def weights_digest(path: Path) -> str:
    """Of the weights, sampled: whole files of hundreds of gigabytes are not read for it."""
    from windlass.runtime.weights.transfer.fingerprint import identity

    return identity(path).fingerprint


def planned_speed(name: str, options: EvalOptions, concurrency: int) -> Speed:
    """What the planner predicts for this machine; nothing where it has no prediction."""
    from windlass.open.hardware import resolve_hardware
    from windlass.open.resolve import describe_model
    from windlass.tasks.plan.inference.assemble import make_plan
    from windlass.tasks.plan.inference.search.request import PlanRequest

    hardware = resolve_hardware(None)
    watts = (
        options.watts if options.watts is not None else sum(device.watts for node in hardware.nodes for device in node.devices)
    )
    try:
        found = describe_model(name)
        context = min(options.launch.context_tokens or 2048, found.spec.context_tokens)
        request = PlanRequest(
            spec=found.spec,
            rules=found.rules,
            hardware=hardware,
            context_tokens=context,
            concurrency=concurrency,
            engine="windlass",
            region=options.region,
        )
        plan = make_plan(request, source=found.source, digest=found.digest)
    except Error:
        return Speed(watts=watts)
    if plan.speed is None:
        return Speed(watts=watts)
    return Speed(
        prompt_tokens_per_second=plan.speed.prefill_tokens_per_second,
        answer_tokens_per_second=plan.speed.decode_tokens_per_second,
        watts=watts,
        usd_per_hour=plan.cost.usd_per_hour,
        memory_bytes=sum(device.total_bytes for device in plan.memory.per_device),
        source="the plan",
    )


def unique_label(label: str, name: str, taken: set[str]) -> str:
    """Two servers may serve a model of one name."""
    found, number = folder_name(label), 2
    if found in taken:
        found = folder_name(f"{label}-{name.removeprefix('http://').removeprefix('https://')}")
    while found in taken:
        found, number = f"{folder_name(label)}-{number}", number + 1
    return found


class MemoryCheck:
    """Memory of this process's children, before a model is opened and after it was closed."""

    def __init__(self) -> None:
        self.before_bytes = _resident_bytes()

    def kept_bytes(self) -> int:
        return max(_resident_bytes() - self.before_bytes, 0)

    def check(self, label: str) -> str:
        """A line to show if memory was not given back; empty: all is well."""
        kept = self.kept_bytes()
        if kept <= GIVEN_BACK_BYTES:
            return ""
        return f"{label}: {kept / 2**20:.0f} MiB were not given back after it was closed"


def _resident_bytes() -> int:
    from windlass.runtime.machine.memory import process_memory, process_tree

    _, *children = process_tree(os.getpid())
    return sum(process_memory(pid).anonymous_bytes for pid in children)


def check_names(models: tuple[str, ...]) -> None:
    if not models:
        raise BadInput("name at least one model or server to evaluate (see `windlass eval --help`)")
    twice = next((name for name in models if models.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"{twice} is named twice")
