"""What one engine says that nobody disturbs, in this process: what a model that is split is compared with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from asking import Answer

from windlass.core.launch import Launch
from windlass.core.request import Request
from windlass.runtime.engine.client.client import EngineClient, with_text
from windlass.runtime.engine.load import load_model

ENGINE = str(Path(__file__).parents[2] / "runtime" / "engine")
if ENGINE not in sys.path:
    sys.path.append(ENGINE)

from in_process import InProcessClient  # noqa: E402


def answers(model: Path, requests: Sequence[Request], context_tokens: int) -> list[Answer]:
    """All at the same time, on the CPU, in fp32."""
    launch, text = with_text(Launch(model=str(model), device="cpu", exact=True, kv="fp32", context_tokens=context_tokens))

    async def run() -> list[Answer]:
        client = InProcessClient(*load_model(launch), text)
        try:
            return list(await asyncio.gather(*(_answer(client, request) for request in requests)))
        finally:
            await client.close()

    return asyncio.run(run())


async def _answer(client: EngineClient, request: Request) -> Answer:
    answer = Answer()
    async for delta in client.generate(request):
        answer.text += delta.content
        answer.tokens += delta.token_ids
        answer.finish = delta.finish_reason or answer.finish
    return answer
