"""Experts that go to the device and to host memory as they are loaded."""

from __future__ import annotations

import pytest
import torch

from windlass.core.scheme import scheme
from windlass.core.tiers.device import DeviceSplit
from windlass.core.tiers.placement import SPARE_SLOTS, experts_on_device
from windlass.model.families import describe, rules
from windlass.model.families.registry import find, published_config
from windlass.runtime.kernels.cuda.tiered import TieredTiles
from windlass.runtime.offload.device.weights import DeviceTieredWeights
from windlass.runtime.weights.load.random import RandomWeights

pytestmark = pytest.mark.cpu


def source() -> RandomWeights:
    known = find("GLM-4.5-Air")
    assert known is not None
    small = {
        "num_hidden_layers": 4, "num_nextn_predict_layers": 0, "hidden_size": 512, "moe_intermediate_size": 384, "n_routed_experts": 32,
        "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    }  # fmt: skip
    spec = describe({**published_config(known), **small}, "small")
    return RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cpu", tiled=True)


@pytest.mark.parametrize(("on_device", "share"), [(20, 0.6), (0, 1.0), (31, 0.0), (32, 0.5)])
def test_every_expert_is_in_one_place(on_device: int, share: float) -> None:
    behind = source()
    split = DeviceSplit(3, 32, on_device, has_shared=True, share=share)
    tiered = DeviceTieredWeights(source(), split, first_layer=1)
    seen: set[int] = set()
    for layer in (1, 2, 3):
        found = tiered.experts(layer, "gate", "up")
        assert isinstance(found, TieredTiles) and tiered.experts(layer, "down") is found
        gate_up, down = behind.experts(layer, "gate", "up"), behind.experts(layer, "down")
        for expert, at in enumerate(found.table.tolist()[:-1]):
            if at >= 0:
                seen.add(at)
                assert torch.equal(found.slots.gate_up.data[at], gate_up.data[expert])
                assert torch.equal(found.slots.down.data[at], down.data[expert])
                assert found.whole_table[expert] == at
            else:
                host = tiered.in_host_memory(layer)
                assert torch.equal(host.gate_up[-1 - at], gate_up.data[expert])
                assert torch.equal(torch.cat((host.down_share[-1 - at], host.down[-1 - at]), dim=1), down.data[expert])
                assert found.whole_table[expert] >= split.staging
        seen.add(found.shared_slot)
    assert seen == set(range(split.first_spare)), "a slot is unused, or used twice"


@pytest.mark.parametrize(("slots", "expected"), [(31, -1), (2 * 16, 0), (2 * 16 + 8 * 3, 3), (2 * 16 + 8 * 16, 16), (10**6, 16)])
def test_experts_on_the_device(slots: int, expected: int) -> None:
    """Ten layers of 16: two layers' worth of staging slots come first, of which an expert on the device needs none."""
    assert experts_on_device((slots + SPARE_SLOTS) * 7, 10, 16, 7) == expected


def test_whole_layers_are_copied_to_the_staging_slots() -> None:
    """Whatever the CPU's part is: in steps of many rows it has none; after the last layer, or a step that was given up, its part is zero again."""
    behind, split = source(), DeviceSplit(3, 32, 20, has_shared=True, share=0.6)
    tiered = DeviceTieredWeights(source(), split, first_layer=1)
    layers = [tiered.experts(layer, "gate", "up") for layer in (1, 2, 3)]
    slots = layers[0].slots

    def shares_are_zero() -> bool:
        """Of the first half, which steps of few rows use."""
        staged = slice(slots.staging, slots.staging + split.in_host)
        blocks = layers[0].share_blocks
        parts = slots.gate_up.data[staged, : blocks * 16], slots.down.data[staged, :, :blocks]
        return not any(part.any() for part in parts)

    for given_up in (True, False):
        for number, found in enumerate(layers):
            assert found.copies is not None
            found.copies.before(number)
            gate_up, down = behind.experts(number + 1, "gate", "up"), behind.experts(number + 1, "down")
            for expert, at in enumerate(found.whole_table.tolist()[:-1]):
                assert torch.equal(slots.gate_up.data[at], gate_up.data[expert])
                assert torch.equal(slots.down.data[at], down.data[expert])
            assert not shares_are_zero()
            if given_up:
                found.abandon()
                assert shares_are_zero()
                break
            found.copies.after(number)
    assert shares_are_zero()
