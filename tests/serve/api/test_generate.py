"""What a request is charged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fake import FakeClient
from serving import HELLO, in_process

from waiting import HUNG_SECONDS
from windlass.core.request import Delta, Request, Usage
from windlass.serve.api.adapters import chat_job
from windlass.serve.api.caller import KEY
from windlass.serve.api.generate import GenerateEndpoint
from windlass.serve.api_key import ApiKey
from windlass.serve.http.asgi import ClientDisconnected

pytestmark = pytest.mark.pure
PROMPT_TOKENS = 11


class SayingClient(FakeClient):
    """Says first how long the prompt is, as an engine does."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        yield Delta(usage=Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=0))
        async for delta in super().generate(request):
            yield delta


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_early_pays_for_what_was_made(n: int) -> None:
    async def run() -> None:
        client, gone = SayingClient(hold_after=5), asyncio.Event()
        body = json.dumps({**HELLO, "stream": True, "n": n, "max_tokens": 8}).encode()
        num_words = 0
        is_read = False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if is_read:
                await gone.wait()
                return {"type": "http.disconnect"}
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal num_words
            num_words += message.get("body", b"").count(b'"content":"w')
            if num_words >= 5 * n:
                gone.set()

        keys = (ApiKey(name="a", key="alpha", tokens_per_day=1000),)
        async with in_process(client, api_keys=keys) as (_, service):
            scope = {"type": "http", "headers": [], "path": "/v1/chat/completions", "method": "POST", KEY: 1}
            charged: list[Usage] = []
            service.charge = lambda key, usages: charged.extend(usages)  # type: ignore[method-assign]
            async with asyncio.timeout(HUNG_SECONDS):
                with pytest.raises(ClientDisconnected):
                    await GenerateEndpoint(service, chat_job)(scope, receive, send)
            assert [one.prompt_tokens for one in charged] == [PROMPT_TOKENS] * n
            assert all(one.completion_tokens >= 5 for one in charged)

    asyncio.run(run())
