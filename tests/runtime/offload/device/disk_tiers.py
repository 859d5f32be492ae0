"""Small models with experts on the device, in host memory and in a file; questions as a device asks them, and the answers from weights in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from windlass.core.scheme import scheme
from windlass.core.tiers.device import DeviceSplit
from windlass.model.families import describe, rules
from windlass.model.families.registry import find, published_config
from windlass.runtime.kernels.cuda.layout import dequantize
from windlass.runtime.kernels.cuda.tiered import ITEM_BYTES, ITEMS_AT, ROWS_AT, TieredTiles, sums_at
from windlass.runtime.offload.device.disk import DiskPlace
from windlass.runtime.offload.device.weights import DeviceTier, DeviceTieredWeights
from windlass.runtime.weights.load.random import RandomWeights

HIDDEN, WIDTH, EXPERTS, LAYERS = 512, 384, 32, 3
Item = tuple[int, list[int], list[float]]
"""Expert, rows, weights."""


def source(model: str = "GLM-4.5-Air", group: int = 128) -> RandomWeights:
    known = find(model)
    assert known is not None
    small = {
        "num_hidden_layers": 4, "num_nextn_predict_layers": 0, "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH,
        "n_routed_experts": EXPERTS, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "first_k_dense_replace": 1,
    }  # fmt: skip
    config = published_config(known)
    spec = describe({**config, **{key: value for key, value in small.items() if key in config}}, "small")
    return RandomWeights(spec, rules(spec), quant=scheme("int4", group), device="cpu", tiled=True)


def place_in(folder: Path) -> DiskPlace:
    return DiskPlace(folder, "k" * 32, keep=True, bytes_per_second=1e9)


class Tiers:
    """Layers with experts in three tiers, asked as the device asks."""

    def __init__(self, folder: Path, split: DeviceSplit, behind: RandomWeights | None = None) -> None:
        self.weights = DeviceTieredWeights(behind or source(), split, 1, place_in(folder))
        self.layers: list[TieredTiles] = [self.weights.experts(1 + layer, "gate", "up") for layer in range(split.num_layers)]
        self.tier: DeviceTier = self.weights.finish()
        self.mailbox = self.layers[0].mailbox

    def ask(self, layer: int, x: Tensor, items: list[Item]) -> Tensor:
        """Of experts that are not on the device."""
        table = self.layers[layer].table.tolist()
        placed = [(-1 - table[expert], rows, weights) for expert, rows, weights in items]
        self.mailbox[4:16].view(torch.int32).copy_(torch.tensor([x.shape[0], len(items), layer], dtype=torch.int32))
        for number, (place, rows, weights) in enumerate(placed):
            at, padding = ITEMS_AT + number * ITEM_BYTES, 8 - len(rows)
            self.mailbox[at : at + 40].view(torch.int32).copy_(torch.tensor([place, len(rows), *rows, *[-1] * padding]))
            self.mailbox[at + 40 : at + 72].view(torch.float32).copy_(torch.tensor([*weights, *[0.0] * padding]))
        self.mailbox[ROWS_AT : ROWS_AT + x.numel() * 2].view(torch.bfloat16).copy_(x.flatten())
        assert self.tier.share is not None
        self.tier.share.ask()
        start = sums_at(HIDDEN)
        return self.mailbox[start : start + x.numel() * 4].view(torch.float32).view(x.shape).clone()


class Reference:
    """The CPU's part of a question, from weights that are all in memory."""

    def __init__(self, split: DeviceSplit, behind: RandomWeights | None = None) -> None:
        behind = behind or source()
        self._split = split
        self._layers = [
            [dequantize(behind.experts(1 + layer, *parts), torch.float32) for parts in (("gate", "up"), ("down",))]
            for layer in range(split.num_layers)
        ]

    def answer(self, layer: int, x: Tensor, items: list[Item]) -> Tensor:
        gate_up, down = self._layers[layer]
        out = torch.zeros(x.shape, dtype=torch.float64)
        for expert, rows, weights in items:
            blocks = WIDTH // 128 if expert < self._split.on_disk else self._split.share_blocks(WIDTH // 128)
            for row, weight in zip(rows, weights, strict=True):
                y = gate_up[expert].double() @ x[row].double()
                act = torch.nn.functional.silu(y[:WIDTH]) * y[WIDTH:]
                out[row] += weight * (down[expert].double()[:, : blocks * 128] @ act[: blocks * 128])
        return out


def question(generator: torch.Generator, tiers: Tiers, layer: int, rows: int, active: int) -> tuple[Tensor, list[Item]]:
    """Each row chooses some experts; those on the device are not asked for."""
    x = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
    chosen: dict[int, list[int]] = {}
    for row in range(rows):
        for expert in torch.randperm(EXPERTS, generator=generator)[:active].tolist():
            chosen.setdefault(expert, []).append(row)
    table = tiers.layers[layer].table.tolist()
    items: list[Item] = []
    for expert in sorted(chosen):
        users = chosen[expert]
        for first in range(0, len(users), 8) if table[expert] < 0 else ():
            some = users[first : first + 8]
            items.append((expert, some, torch.rand(len(some), generator=generator).tolist()))
    return x, items


SPLITS = [
    DeviceSplit(LAYERS, EXPERTS, 10, has_shared=True, share=0.6, on_disk=12, cache_slots=16),
    DeviceSplit(LAYERS, EXPERTS, 0, has_shared=True, share=1.0, on_disk=32, cache_slots=5),
    DeviceSplit(LAYERS, EXPERTS, 20, has_shared=True, share=0.0, on_disk=3, cache_slots=2),
]
