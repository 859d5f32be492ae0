"""Adapters enter and leave an engine that runs: nothing in flight notices, and the next engine has those that were loaded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from windlass.core.launch import Launch  # noqa: E402
from windlass.core.request import GREEDY, Request  # noqa: E402
from windlass.errors import BadInput, Impossible  # noqa: E402
from windlass.model.bundled.models import find_bundled  # noqa: E402
from windlass.model.families import rules  # noqa: E402
from windlass.runtime.engine.adapters import AdapterChanges  # noqa: E402
from windlass.runtime.engine.client.client import LocalClient, open_client  # noqa: E402
from windlass.runtime.engine.engine import Engine  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.engine.protocol import (  # noqa: E402
    AdapterChanged,
    AddAdapter,
    RequestRejected,
    SequenceOutput,
    Submit,
    as_error,
)
from windlass.runtime.weights.adapters import published_matrices  # noqa: E402
from windlass.runtime.weights.source import open_model  # noqa: E402

pytestmark = pytest.mark.multi
RANK = 4
TOKENS = 96


def make_adapter(folder: Path, model: Path) -> None:
    """Of every attention matrix; tests/runtime/nn/test_adapters.py has experts too."""
    opened = open_model(model)
    opened.store.close()
    made: dict[str, Any] = {}
    source = torch.Generator().manual_seed(1)
    for module, (ours, (out, into)) in published_matrices(rules(opened.spec)).items():
        if ".mixer." in ours:
            made[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, into, generator=source) / into**0.5
            made[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, RANK, generator=source)
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}))


def both(engine: Engine, folder: Path | None) -> list[SequenceOutput]:
    """Two requests, the second of which comes after some steps, with an adapter that is put in then. Returns the first one's outputs."""
    prompt = [(7 * place + 3) % 50 for place in range(19)]
    first = Submit(id=1, token_ids=prompt, sampling=GREEDY, max_tokens=24, logprobs=0, cache_salt=str(folder))
    engine.submit(first)
    found = [output for _ in range(6) for output in engine.step()]
    changes = AdapterChanges(engine)
    if folder is not None:
        changes.add(AddAdapter(9, "tone", str(folder)))
    while len(changes):
        assert changes.finished() in ([], [AdapterChanged(9)])
    engine.submit(
        msgspec.structs.replace(first, id=2, token_ids=prompt[:9], max_tokens=8, adapter="tone" if folder is not None else "")
    )
    while engine.has_work:
        found += engine.step()
    assert len([output for output in found if output.id == 2 and output.token_ids]) == 8
    return [output for output in found if output.id == 1]


def tokens_of(outputs: list[SequenceOutput]) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in outputs]


def test_requests_without_an_adapter_keep_their_bits(tmp_path: Path) -> None:
    model = find_bundled("tiny-glm")
    assert model is not None
    make_adapter(tmp_path / "tone", model)
    engine, _ = load_model(Launch(model=str(model), device="cpu", max_sequences=4))
    try:
        plain = both(engine, None)
        assert tokens_of(both(engine, tmp_path / "tone")) == tokens_of(plain), "to the last bit"
        assert tokens_of(both(engine, None)) == tokens_of(plain)
    finally:
        engine.close()


def test_a_layout_without_adapters_is_said(tmp_path: Path) -> None:
    """Tiles of the Hopper kernels: the server then starts the engine with the adapter."""

    class Tiled:
        fused = object()

    engine: Any = SimpleNamespace(runner=SimpleNamespace(decoder=Tiled()), has_work=False)
    changes = AdapterChanges(engine)
    changes.add(AddAdapter(3, "tone", str(tmp_path)))
    found: list[Any] = []
    while not found:
        found = changes.finished()
    assert isinstance(found[0], RequestRejected) and isinstance(as_error(found[0]), Impossible) and found[0].id == 3


async def answer(client: LocalClient, adapter: str = "", tokens: int = TOKENS, began: asyncio.Event | None = None) -> list[Any]:
    """Its tokens."""
    request = Request(
        prompt="Sort 9, 4, 7.",
        sampling=GREEDY,
        max_tokens=tokens,
        ignore_eos=True,
        adapter=adapter,
        cache_salt=os.urandom(8).hex(),
    )
    found: list[Any] = []
    async for delta in client.generate(request):
        found += delta.token_ids
        if found and began is not None:
            began.set()
    return found


def engine_of(client: LocalClient) -> int:
    transport: Any = client._requests._connected().transport
    assert transport.pid is not None
    return transport.pid


def test_an_adapter_comes_and_goes_while_requests_run(tmp_path: Path) -> None:
    model = find_bundled("tiny-glm")
    assert model is not None
    make_adapter(tmp_path / "tone", model)

    async def run() -> None:
        client = open_client(Launch(model=str(model), device="cpu", max_sequences=4))
        try:
            alone = await answer(client)
            engine, began, is_over = engine_of(client), asyncio.Event(), asyncio.Event()

            async def ask_on() -> list[list[Any]]:
                """One request after another, so that one is always under way."""
                found = [await answer(client, began=began)]
                while not is_over.is_set():
                    found.append(await answer(client))
                return found

            running = asyncio.create_task(ask_on())
            await began.wait()
            with pytest.raises(BadInput, match="not loaded"):
                await answer(client, "tone")
            with pytest.raises(BadInput, match="adapter_config"):
                await client.add_adapter("tone", str(tmp_path / "nowhere"))
            await client.add_adapter("tone", str(tmp_path / "tone"))
            adapted = await answer(client, "tone", 12)
            is_over.set()
            for found in await running:
                assert len(found) == TOKENS and found[:12] == alone[:12], "nothing of it is lost; the test above compares bits"
            assert adapted != alone[:12] and engine_of(client) == engine
            os.kill(engine, signal.SIGKILL)
            while client.is_alive:
                await asyncio.sleep(0.01)
            assert await answer(client, "tone", 12) == adapted and engine_of(client) != engine, "the next engine has it too"
            began = asyncio.Event()
            last = asyncio.create_task(answer(client, "tone", 12, began))
            await began.wait()
            await client.remove_adapter("tone")
            assert last.done() or len(await last) == 12, "it goes with its last request"
            with pytest.raises(BadInput, match="not loaded"):
                await answer(client, "tone")
            assert await answer(client, tokens=12) == alone[:12]
        finally:
            await client.close()

    asyncio.run(run())
