"""A router whose models take turns in one slot: waiting is not silence, deadlines hold, shares are exported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from routing import NAME, SUM, Model, chat, fitted

from windlass.core.client import Late
from windlass.errors import BadInput
from windlass.tasks.route.operate.arm import Arm
from windlass.tasks.route.operate.breakers import BreakerSettings
from windlass.tasks.route.operate.client import RouterClient
from windlass.tasks.route.operate.gate import GatedClient, SwapGate
from windlass.tasks.route.operate.log import DecisionLog
from windlass.tasks.route.operate.settings import ModelSettings, RouteSettings, read_settings

pytestmark = pytest.mark.pure


def swapping(load_seconds: float, silent_seconds: float) -> RouterClient:
    def opener(name: str):  # type: ignore[no-untyped-def]
        async def run() -> Model:
            await asyncio.sleep(load_seconds)
            return Model(name)

        return run

    router = fitted().router
    names = [model.name for model in router.models]
    gate = SwapGate({name: opener(name) for name in names}, max_wait_seconds=5.0)
    arms: dict[str, Arm] = {}
    for model in router.models:
        client = GatedClient(gate, model.name)
        settings = ModelSettings(name=model.name, at="here", resident=False)
        arm = arms[model.name] = Arm(settings, model, client, BreakerSettings(), asyncio.get_running_loop().time)
        arm.enter, arm.is_loaded = client.enter, lambda client=client: client.is_loaded
    settings = RouteSettings(
        router="router.json", models=tuple(arm.settings for arm in arms.values()), first_token_seconds=silent_seconds
    )
    return RouterClient(router, settings, arms, DecisionLog(None), gate=gate)


async def _answer(router: RouterClient, prompt: str, deadline: float | None = None) -> str:
    request = msgspec.structs.replace(chat(prompt), deadline_seconds=deadline)
    return "".join([delta.content async for delta in router.generate(request)])


def test_waiting_for_a_swap_is_not_silence() -> None:
    """Loading takes longer than a model may be silent, and nobody falls back to the wrong model."""

    async def run() -> None:
        router = swapping(load_seconds=0.2, silent_seconds=0.1)
        found = await asyncio.gather(*(_answer(router, prompt) for prompt in (SUM, NAME, SUM, NAME)))
        assert [text.split()[0] for text in found] == ["small", "large", "small", "large"]
        assert router.counters.fallbacks == 0 and router.gate is not None and router.gate.num_swaps == 2
        assert router.counters.decisions == {"small": 2, "large": 2}
        await router.close()

    asyncio.run(run())


def test_a_deadline_holds_while_a_model_loads() -> None:
    async def run() -> None:
        router = swapping(load_seconds=5.0, silent_seconds=1.0)
        with pytest.raises(Late):
            await _answer(router, SUM, deadline=0.1)
        await router.close()

    asyncio.run(run())


def test_the_expected_share_is_that_of_the_fitted_path() -> None:
    async def run() -> None:
        router = swapping(0.0, 1.0)
        share = router.expected_share()
        assert sum(share.values()) == pytest.approx(1.0)
        chosen = fitted().path.choices[:, fitted().chosen]
        assert share["small"] == pytest.approx((chosen == 0).mean())

    asyncio.run(run())


def test_models_of_the_command_line(tmp_path: Path) -> None:
    given = {"small": "a.gguf", "large": "b"}
    found = read_settings(tmp_path / "router.json", given, keep=1)
    assert [(one.name, one.at, one.resident) for one in found.models] == [("small", "a.gguf", False), ("large", "b", False)]
    assert all(one.resident for one in read_settings(tmp_path / "router.json", given, keep=2).models)
    file = tmp_path / "router.toml"
    file.write_text(
        'router = "r.json"\nsticky = false\n[[models]]\nname = "small"\nat = "x"\n[[models]]\nname = "large"\nat = "http://y"\n'
    )
    mixed = read_settings(file, {"small": "a.gguf"})
    assert [one.at for one in mixed.models] == ["a.gguf", "http://y"] and not mixed.sticky
    with pytest.raises(BadInput, match="no model other"):
        read_settings(file, {"other": "a.gguf"})
    with pytest.raises(BadInput, match="one at a time"):
        read_settings(tmp_path / "router.json", {**given, "third": "c"}, keep=2)
