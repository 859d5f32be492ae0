"""A router behind the server: its names, its decisions as headers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tasks" / "route"))

from routing import NAME, SUM, Model, routed
from serving import in_process

from windlass.core.client import Unavailable

pytestmark = pytest.mark.pure


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def test_clients_ask_for_auto_and_the_decision_is_in_the_headers() -> None:
    async def run() -> None:
        async with in_process(routed(Model("small"), Model("large"))) as (http, _):
            listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
            assert listed == ["auto", "auto:cheap", "auto:best", "small", "large"]
            sums, names = [await http.post("/v1/chat/completions", json=body(text)) for text in (SUM, NAME)]
            assert sums.headers["windlass-route-model"] == "small" and names.headers["windlass-route-model"] == "large"
            assert "chance" in sums.headers["windlass-route-reason"]
            assert sums.json()["choices"][0]["message"]["content"].startswith("small says")
            cheap = await http.post("/v1/chat/completions", json=body(NAME, model="auto:cheap"))
            assert cheap.headers["windlass-route-model"] == "small"
            refused = await http.post("/v1/chat/completions", json=body(NAME, model="auto:other"))
            assert refused.status_code == 404

    asyncio.run(run())


def test_a_stream_falls_back_and_says_so() -> None:
    async def run() -> None:
        small = Model("small", fails=lambda number: Unavailable("gone") if number else None)
        async with in_process(routed(small, Model("large"))) as (http, _):
            found = await http.post("/v1/chat/completions", json=body(SUM, stream=True))
            assert found.headers["windlass-route-model"] == "large" and found.headers["windlass-route-instead-of"] == "small"
            assert "[DONE]" in found.text and "large" in found.text

    asyncio.run(run())
