"""Slices of feed-forwards that go to the device and to host memory as they are loaded, and who computes with them."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.fused import slice_blocks
from windlass.core.scheme import scheme
from windlass.core.tiers.demand import in_slices
from windlass.core.tiers.device import DeviceSplit
from windlass.core.tiers.values import Demand, Speeds, Unit
from windlass.errors import Impossible
from windlass.model.families import describe, rules
from windlass.model.families.registry import find, published_config
from windlass.runtime.kernels import build
from windlass.runtime.kernels.cuda import layout
from windlass.runtime.kernels.cuda.sliced import SlicedTiles
from windlass.runtime.offload.device.dense import DenseTieredWeights, cpu_shares
from windlass.runtime.offload.device.share import library
from windlass.runtime.weights.load.random import RandomWeights

pytestmark = pytest.mark.cpu

SLICES = 4


def source() -> RandomWeights:
    known = find("Llama-3.1-8B")
    assert known is not None
    small = {
        "num_hidden_layers": 3, "hidden_size": 512, "intermediate_size": 4096, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 256, "head_dim": 128,
    }  # fmt: skip
    spec = describe({**published_config(known), **small}, "small")
    return RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cpu", tiled=True)


def names(layer: int, *parts: str) -> list[str]:
    return [f"layers.{layer}.ffn.{part}.weight" for part in parts]


@pytest.mark.parametrize("on_device", [0, 1, 3])
def test_slices_together_are_the_whole(on_device: int) -> None:
    behind = source()
    tiered = DenseTieredWeights(source(), DeviceSplit(3, SLICES, on_device, has_shared=False, share=0.0))
    layers: list[SlicedTiles] = []
    for layer in range(3):
        found = tiered.matrix(*names(layer, "gate", "up"))
        assert isinstance(found, SlicedTiles) and tiered.matrix(*names(layer, "down")) is found
        layers.append(found)
    for first in (0, SLICES - on_device - 1):
        for layer, found in enumerate(layers):  # as a step does
            gate_up, down = behind.matrix(*names(layer, "gate", "up")), behind.matrix(*names(layer, "down"))
            assert found.num_bytes == gate_up.num_bytes + down.num_bytes
            found.staged.before(layer, first)
            low, high = found.staged.buffer(layer, first)
            skipped = gate_up.num_tiles // SLICES * (on_device + first), down.tile_blocks // SLICES * (on_device + first)
            assert torch.equal(low.data, gate_up.data[:, skipped[0] :]) and low.rows == low.num_tiles * 16
            assert torch.equal(high.data, down.data[:, :, skipped[1] :]) and high.inputs == high.width
            found.staged.after(layer, first)
            if on_device:
                assert found.gate_up is not None and found.down is not None
                assert torch.equal(found.gate_up.data, gate_up.data[:, : found.gate_up.num_tiles])
                assert torch.equal(found.down.data, down.data[:, :, : found.down.tile_blocks])
            else:
                assert found.gate_up is found.down is None
    tier = tiered.finish()
    assert tier.stats().device_bytes + tier.stats().host_bytes == sum(found.num_bytes for found in layers)
    tier.close()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_cpu_has_its_share_of_every_step(share: float) -> None:
    if library() is None and shutil.which("g++") is None:
        pytest.skip("no compiler")
    assert library() is not None, build.why_not("tiles")
    tiered = DenseTieredWeights(source(), DeviceSplit(3, SLICES, 1, has_shared=False, share=share))
    for layer in range(3):
        made = tiered.matrix(*names(layer, "gate", "up"))
        tiered.matrix(*names(layer, "down"))
    tier = tiered.finish()
    try:
        assert isinstance(made, SlicedTiles) and made.shares is tier.shares and tier.share is not None
        counts = [tier.shares.of(rows) for rows in (1, 2, 8, 16, 32, 64)]
        assert all(0 <= count <= 3 for count in counts) and (share < 1 or counts == [3] * 6)
        assert tier.share.counts.busy_seconds > 0 and "for one sequence" in tier.line
        assert made.state[0] > 0, "the device goes on counting questions where the measurement ended"
    finally:
        tier.close()


def test_matrices_in_unlike_groups_are_refused() -> None:
    tiered = DenseTieredWeights(source(), DeviceSplit(3, SLICES, 1, has_shared=False, share=0.0))
    tiered.matrix(*names(0, "gate", "up"))
    other = layout.random(1, 512, 4096, 32, 1.0, device="cpu")
    with pytest.raises(Impossible, match="unlike sizes"):
        tiered._second_half("layers.0.ffn", other)


def test_other_matrices_are_as_they_were() -> None:
    tiered = DenseTieredWeights(source(), DeviceSplit(3, SLICES, 2, has_shared=False, share=0.0))
    assert torch.equal(tiered.matrix("layers.0.mixer.o.weight").data, source().matrix("layers.0.mixer.o.weight").data)


@given(
    st.floats(1, 100), st.floats(1, 100), st.lists(st.floats(1, 50), min_size=1, max_size=5), st.integers(1, 60)
)  # fmt: skip
def test_the_slower_the_cpu_the_fewer_slices_it_has(host: float, link: float, costs: list[float], slices: int) -> None:
    by_rows = dict(zip((1, 2, 8, 16, 64), sorted(costs), strict=False))
    shares = cpu_shares(Speeds(host=host, link=link, disk=0.0), by_rows, slices)
    found = [shares.of(rows) for rows in range(1, max(by_rows) + 1)]
    assert all(0 <= count <= slices for count in found) and found == sorted(found, reverse=True)
    assert shares.of(max(by_rows) + 1) == 0, "steps of more rows copy all"
    for rows, cost in by_rows.items():
        # Within half a slice of where both end together.
        count = shares.of(rows)
        assert abs(count * cost / host - (slices - count) / link) <= 0.5 * (cost / host + 1 / link) + 1e-9


def test_without_a_cpu_all_is_copied() -> None:
    assert cpu_shares(Speeds(host=0.0, link=50.0, disk=0.0), {}, 25).of(1) == 0


@pytest.mark.parametrize(("blocks", "expected"), [(416, 8), (224, 8), (112, 8), (200, 8), (231, 7), (13, 1), (6, 6)])
def test_slice_blocks(blocks: int, expected: int) -> None:
    assert slice_blocks(blocks) == expected


def test_in_slices_keeps_the_bytes() -> None:
    units = [
        Unit(name=f"layers.{layer}.{part}", num_bytes=size)
        for layer in range(3)
        for part, size in (("mixer.q+k+v", 5), ("mixer.o", 3), ("ffn.gate+up", 80), ("ffn.down", 40))
    ]
    found = in_slices(Demand(fixed_bytes=7, units=tuple(units)), 4, 3)
    assert found.experts is not None and found.experts.touched == 1 and found.experts.num_experts == 12
    assert found.total_bytes == 7 + 3 * 128 and found.unit_bytes == 3 * 8
