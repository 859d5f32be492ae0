"""What a rank may use of a machine."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from windlass.core.launch import Launch
from windlass.core.layout import Layout
from windlass.errors import BadInput
from windlass.runtime.engine import load, tiers
from windlass.runtime.engine.tiers import build_decoder
from windlass.runtime.offload.placement import host_budget

pytestmark = pytest.mark.cpu


def budget(host_memory: int | None, free_bytes: int) -> Any:
    system: Any = SimpleNamespace(ram_bytes=free_bytes)
    return host_budget(Launch(host_memory=host_memory), 0, system)


def test_a_cap_above_what_is_free_is_what_is_free() -> None:
    free = budget(None, 2**30)
    assert free.cap_bytes == 2**30 + free.used_bytes
    assert abs(budget(2**40, 2**30).cap_bytes - free.cap_bytes) < 2**28, "the process itself may have grown"
    assert budget(2**29, 2**30).cap_bytes == 2**29


def test_a_model_that_was_closed_does_not_count_as_used() -> None:
    """Decoders are in cycles with their tensors: these stay until somebody looks for such cycles."""
    gc.collect()
    gc.disable()
    try:
        before, cycle = budget(None, 2**30).used_bytes, list[Any]()
        cycle += [cycle, mmap.mmap(-1, 2**28)]
        cycle[1].write(bytes(2**28))
        assert budget(None, 2**30).used_bytes > before + 2**27
        del cycle
        assert budget(None, 2**30).used_bytes < before + 2**27
    finally:
        gc.enable()


def test_a_folder_that_a_device_does_not_use_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(BadInput, match="not beside mps"):
        build_decoder(Launch(disk_folder="/tmp"), "mps", nothing, 0, None)


@pytest.mark.parametrize(
    ("layout", "workers", "gpus", "device", "expected"),
    [
        (Layout(), (), 1, "cuda:0", 1),
        (Layout(pp=2), (), 1, "cuda:0", 2),
        (Layout(pp=2), (), 2, "cuda:1", 1),
        (Layout(pp=3), (), 2, "cuda:0", 2),
        (Layout(pp=2), ("a:1",), 1, "cuda:0", 1),
        (Layout(pp=2), (), 1, "cpu", 1),
    ],
)
def test_ranks_that_share_a_gpu_share_its_memory(
    layout: Layout, workers: tuple[str, ...], gpus: int, device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert load.ranks_per_device(Launch(layout=layout, workers=workers), device) == expected


def test_host_memory_is_asked_before_other_ranks_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks begin to load when they have met: what is free afterwards is no longer what they share."""
    events: list[str] = []
    nothing: Any = SimpleNamespace(part=SimpleNamespace(), spec=None)
    weights: Any = SimpleNamespace(
        source=SimpleNamespace(tiled=True),
        spec=SimpleNamespace(),
        num_bytes=10,
        rank=0,
        shard=SimpleNamespace(groups=None, layers=lambda _: (0, 1)),
    )

    def met(groups: Any, numbers: list[int], device: str) -> list[int]:
        events.append("met")
        return numbers

    def asked(launch: Launch, reserved: int) -> str:
        events.append("asked")
        return "budget"

    monkeypatch.setattr(tiers, "smallest", met)
    monkeypatch.setattr(tiers, "host_budget", asked)
    monkeypatch.setattr(tiers, "ModelStage", lambda *_: nothing)
    monkeypatch.setattr(tiers, "device_limits", lambda *_: tiers.DeviceLimits(0, 0))
    monkeypatch.setattr(tiers, "_least_beside", lambda *_: 0)
    monkeypatch.setattr(tiers, "_beside_device", lambda *given: given)
    found: Any = tiers._on_device(Launch(), "cuda:0", weights, 5, lambda _: nothing)
    assert events == ["asked", "met"] and "budget" in found
