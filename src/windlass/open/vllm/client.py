"""vLLM as a Client: started with the first request, restarted after a crash, called over HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import msgspec

from windlass.core.client import Client, Unavailable
from windlass.core.plan import Plan
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores, Stats
from windlass.errors import BadInput
from windlass.tasks.launch.command import Command, ServedModel
from windlass.tasks.launch.vllm.process import VllmServer

MakeCommand = Callable[[], Command]
"""Makes a new command for every start, with a port that is free now."""


def planned(
    path: Path, plan: Plan | None, context: int | None, concurrency: int | None, name: str
) -> tuple[ServedModel, Plan, MakeCommand]:
    """What to start. Without a plan, makes one for this machine. Renders the command once, to fail early."""
    from windlass.open.vllm.start import plan_vllm, served_model, vllm_command

    if plan is not None and (context is not None or concurrency is not None):
        raise BadInput("--context and --max-running are set by the plan; leave them out, or change the plan")
    model = served_model(path, name)
    if plan is None:
        plan = plan_vllm(path, context=context, concurrency=concurrency)
    make_command = partial(vllm_command, plan, model)
    for note in make_command().notes:
        print(f"vLLM: {note}", file=sys.stderr)
    return model, plan, make_command


class VllmClient:
    """A Client. Closing it ends vLLM."""

    def __init__(self, make_command: MakeCommand, model: str, plan: Plan) -> None:
        self._make_command, self._model, self._plan = make_command, model, plan
        self._server: VllmServer | None = None
        self._client: Client | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        return self._client is not None and self._server is not None and self._server.is_alive

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        async with aclosing((await self._ready()).generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def score(self, request: ScoreRequest) -> Scores:
        return await (await self._ready()).score(request)

    async def info(self) -> Info:
        """What vLLM does not report comes from the plan."""
        client, plan = await self._ready(), self._plan
        stats = await self._fetch_stats()
        found = await client.info()
        return msgspec.structs.replace(
            found,
            max_sequences=plan.workload.concurrency,
            context_tokens=found.context_tokens or plan.workload.context_tokens,
            device=plan.hardware,
            scheme=plan.scheme.name,
            kv=plan.scheme.kv,
            stats=stats,
        )

    async def tokenize(self, text: object, owner: str = "") -> list[int]:
        return await (await self._ready()).tokenize(text)  # type: ignore[attr-defined]

    async def detokenize(self, token_ids: object) -> str:
        return await (await self._ready()).detokenize(token_ids)  # type: ignore[attr-defined]

    async def restart(self) -> None:
        """For a stuck server: the next request starts another."""
        async with self._starting:
            await self._end()

    async def close(self) -> None:
        self._is_closed = True
        await self._end()

    async def _ready(self) -> Client:
        async with self._starting:
            if self._is_closed:
                raise Unavailable("this client is closed")
            if not self.is_alive:
                await self._end()
                await self._start()
            assert self._client is not None
            return self._client

    async def _fetch_stats(self) -> Stats:
        """From /health and /metrics. Restarts the server if its engine died."""
        import httpx

        from windlass.tasks.launch.vllm.metrics import read_stats

        assert self._server is not None
        url, stats = self._server.base_url, Stats()
        try:
            async with httpx.AsyncClient(timeout=None) as http:  # the supervisor has its own timeout
                is_healthy = (await http.get(f"{url}/health")).is_success
                if is_healthy:
                    numbers = await http.get(f"{url}/metrics")
                    stats = read_stats(numbers.text) if numbers.is_success else stats
        except httpx.HTTPError:
            is_healthy = False
        if not is_healthy:
            await self.restart()
            raise Unavailable("vLLM's engine died; it is being restarted")
        return stats

    async def _start(self) -> None:
        from windlass.runtime.machine.folders import cache_dir
        from windlass.tasks.launch.vllm.process import start
        from windlass.wire.client.http_client import HttpClient

        command = await asyncio.to_thread(self._make_command)  # probes the machine, which is slow
        self._server = start(command, logs=cache_dir() / "logs")
        await self._server.wait_healthy()
        self._client = HttpClient(self._server.base_url, command.env.get("VLLM_API_KEY", ""), self._model)

    async def _end(self) -> None:
        client, self._client = self._client, None
        server, self._server = self._server, None
        if client is not None:
            await client.close()
        if server is not None:
            await asyncio.to_thread(server.close)
