from __future__ import annotations

import asyncio

import pytest
from routing import Clock, Model, chat

from windlass.core.client import Unavailable
from windlass.tasks.route.operate.gate import GatedClient, SwapGate

pytestmark = pytest.mark.pure


def gate(max_wait: float = 60.0, fails: str = "") -> tuple[SwapGate, dict[str, list[Model]]]:
    opened: dict[str, list[Model]] = {"a": [], "b": []}

    def opener(name: str):  # type: ignore[no-untyped-def]
        async def run() -> Model:
            if name == fails:
                raise Unavailable("it does not load")
            opened[name].append(Model(name))
            return opened[name][-1]

        return run

    return SwapGate({name: opener(name) for name in opened}, max_wait, Clock()), opened


def test_waiting_requests_share_a_swap_and_one_model_is_open_at_a_time() -> None:
    made, opened = gate()
    clients = {name: GatedClient(made, name) for name in opened}

    async def one(name: str) -> str:
        return "".join([delta.content async for delta in clients[name].generate(chat("x"))])

    async def run() -> list[str]:
        found = await asyncio.gather(*(one("ab"[place % 2]) for place in range(20)))
        await made.close()
        return found

    found = asyncio.run(run())
    assert [text[0] for text in found] == ["a", "b"] * 10 and made.num_swaps == 2
    assert all(model.closed == 1 for models in opened.values() for model in models)


def test_a_model_that_does_not_load_fails_its_own_requests_only() -> None:
    made, opened = gate(fails="b")
    clients = {name: GatedClient(made, name) for name in opened}

    async def run() -> list[object]:
        asked = [clients[name].info() for name in "aba"]
        found = await asyncio.gather(*asked, return_exceptions=True)
        await made.close()
        return list(found)

    first, second, third = asyncio.run(run())
    assert isinstance(second, Unavailable) and not isinstance(first, Exception) and not isinstance(third, Exception)


def test_a_request_that_is_cancelled_while_it_waits_leaves_the_queue() -> None:
    made, opened = gate()

    async def run() -> None:
        async with made.enter("a"):
            waiting = asyncio.create_task(GatedClient(made, "b").info())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with made.enter("a"):
            pass
        await made.close()

    asyncio.run(run())
    assert made.num_swaps == 1 and opened["b"] == []
