"""vLLM behind our server: started when it is asked for something, started anew after it ended, spoken to over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

from windlass.core.client import Client, Unavailable
from windlass.core.plan import Plan
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores
from windlass.errors import BadInput
from windlass.launch.command import Command
from windlass.launch.vllm_process import VllmServer
from windlass.units import parse_context

CONTEXT = 8192
CONCURRENCY = 64
Progress = Callable[[int, int], None]


def vllm_opener(
    path: Path, plan: Plan | None, *, context: str | None, concurrency: int | None, name: str
) -> Callable[[Progress], Client]:
    from windlass.cli.vllm_open import plan_vllm, served_model, vllm_command

    if plan is not None and (context is not None or concurrency is not None):
        raise BadInput("--context and --max-running are decided by the plan; leave them out, or plan with them")
    model = served_model(path, name)
    if plan is None:
        tokens = CONTEXT if context is None else parse_context(context)
        plan = plan_vllm(path, context=tokens, concurrency=concurrency or CONCURRENCY)
    command = vllm_command(plan, model)
    return lambda _: VllmClient(command, model.name)


class VllmClient:
    """A Client. Closing it ends vLLM."""

    def __init__(self, command: Command, model: str) -> None:
        self._command, self._model = command, model
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
        return await (await self._ready()).info()

    async def tokenize(self, text: object) -> list[int]:
        return await (await self._ready()).tokenize(text)  # type: ignore[attr-defined]

    async def detokenize(self, token_ids: object) -> str:
        return await (await self._ready()).detokenize(token_ids)  # type: ignore[attr-defined]

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

    async def _start(self) -> None:
        from windlass.launch.vllm_environment import cache_dir
        from windlass.launch.vllm_process import start
        from windlass.wire.http_client import HttpClient

        self._server = start(self._command, logs=cache_dir() / "logs")
        await self._server.wait_healthy()
        self._client = HttpClient(self._server.base_url, self._command.env.get("VLLM_API_KEY", ""), self._model)

    async def _end(self) -> None:
        client, self._client = self._client, None
        server, self._server = self._server, None
        if client is not None:
            await client.close()
        if server is not None:
            await asyncio.to_thread(server.close)
