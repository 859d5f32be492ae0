"""What a request is charged."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fake import FakeClient
from serving import HELLO, in_process

from waiting import HUNG_SECONDS
from windlass.core.request import Delta, Request, Usage
from windlass.tasks.serve.api.adapters import chat_job
from windlass.tasks.serve.api.caller import KEY
from windlass.tasks.serve.api.generate import GenerateEndpoint
from windlass.tasks.serve.api_key import ApiKey
from windlass.tasks.serve.http.asgi import ClientDisconnected

pytestmark = pytest.mark.pure
PROMPT_TOKENS = 11
MAX_CALLS_PER_TOKEN = 12
"""Of Python functions, from a client's delta to the server's socket; there are 11."""


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


class ScriptedClient(FakeClient):
    """Does nothing but give deltas that were made before."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        usage = Usage(prompt_tokens=1, completion_tokens=request.max_tokens or 0)
        last = Delta(content="x", token_ids=(1,), finish_reason="length", usage=usage)
        for delta in [Delta(content="x", token_ids=(1,))] * ((request.max_tokens or 1) - 1) + [last]:
            yield delta


def test_a_token_takes_few_calls() -> None:
    """What is done for every token is most of what a server does; what can be done once a request does not belong there."""

    async def calls(http: httpx.AsyncClient, num_tokens: int) -> int:
        count = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call" and str(frame.f_globals.get("__name__")).startswith("windlass.")

        sys.setprofile(note)
        try:
            answer = await http.post("/v1/chat/completions", json={**HELLO, "stream": True, "max_tokens": num_tokens})
        finally:
            sys.setprofile(None)
        assert answer.status_code == 200 and answer.text.count('"content":"x"') == num_tokens
        return count

    async def run() -> float:
        async with in_process(ScriptedClient()) as (http, _):
            await calls(http, 2)
            return (await calls(http, 400) - await calls(http, 200)) / 200

    assert asyncio.run(run()) <= MAX_CALLS_PER_TOKEN
