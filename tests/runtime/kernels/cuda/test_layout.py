"""Repacking keeps every number: what the tiles hold is what the checkpoint's codes and scales say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from windlass.errors import BadInput
from windlass.runtime.kernels.cuda import layout

pytestmark = pytest.mark.cpu


def checkpoint(*shape: int, group: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes int32 [.., inputs / 8], scales bf16 and the weights they stand for."""
    generator = torch.Generator().manual_seed(seed)
    nibbles = torch.randint(0, 16, shape, generator=generator)
    words = (nibbles.reshape(*shape[:-1], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    scales = (torch.rand(*shape[:-1], shape[-1] // group, generator=generator) + 0.5).to(torch.bfloat16)
    weights = (nibbles - 8).float() * scales.float().repeat_interleave(group, dim=-1)
    return words, scales, weights


@pytest.mark.parametrize(
    ("rows", "inputs", "group"), [(16, 128, 128), (48, 384, 128), (32, 256, 32), (32, 320, 64), (16, 96, 32)]
)
@pytest.mark.parametrize("paired", [False, True])
def test_tiles_hold_the_weights(rows: int, inputs: int, group: int, paired: bool) -> None:
    codes, scales, weights = checkpoint(2, rows, inputs, group=group)
    tiles = layout.repack(codes, scales, paired=paired)
    assert torch.equal(layout.dequantize(tiles), weights)


def test_first_word_is_as_documented() -> None:
    codes, scales, _ = checkpoint(16, 128, group=128)
    word = layout.repack(codes, scales).data.flatten()[:4].view(torch.int32).item()
    inputs = (0, 1, 8, 9)
    row = [codes[0, k // 8].item() >> 4 * (k % 8) & 15 for k in inputs]
    below = [codes[8, k // 8].item() >> 4 * (k % 8) & 15 for k in inputs]
    assert [word >> 4 * i & 15 for i in (0, 4, 2, 6)] == row
    assert [word >> 4 * i & 15 for i in (1, 5, 3, 7)] == below


def test_experts_stream_into_one_allocation() -> None:
    parts = [checkpoint(32, 128, group=128, seed=seed) for seed in range(3)]
    whole = layout.empty(3, 32, 128, 128, device="cpu")
    for number, (codes, scales, _) in enumerate(parts):
        layout.repack(codes, scales, out=whole, first=number)
    assert torch.equal(layout.dequantize(whole), torch.stack([weights for _, _, weights in parts]))


def test_refuses_what_kernels_cannot_read() -> None:
    with pytest.raises(BadInput, match="groups must be 32, 64 or 128"):
        layout.empty(1, 24, 128, 128, device="cpu")


def whole(tiles: layout.Tiles) -> torch.Tensor:
    """With what fills the inputs up, as kernels see it: they multiply all of it."""
    return layout.dequantize(replace(tiles, inputs=tiles.width))


SHAPES = [(32, 128, 128), (32, 320, 64), (16, 96, 32), (16, 17 * 128, 128), (16, 17 * 128 + 32, 32)]


@pytest.mark.parametrize(("rows", "inputs", "group"), SHAPES)
def test_what_fills_up_counts_for_nothing(rows: int, inputs: int, group: int) -> None:
    codes, scales, weights = checkpoint(2, rows, inputs, group=group)
    for tiles in (layout.repack(codes, scales), layout.random(2, rows, inputs, group, 0.1, device="cpu")):
        assert tiles.width >= inputs and tiles.width % 128 == 0
        assert not whole(tiles)[..., inputs:].any()
    assert torch.equal(whole(layout.repack(codes, scales))[..., :inputs], weights)


def test_warps_divide_the_blocks() -> None:
    for inputs in range(128, 40000, 128):
        blocks = layout.num_blocks(inputs)
        assert inputs <= blocks * 128 <= inputs * 1.25
        assert blocks <= 16 or any(blocks % warps == 0 for warps in range(5, 12))
    assert layout.num_blocks(129) == 2
    assert layout.num_blocks(10944) == 88  # GLM-4.5-Air's: 85.5


@pytest.mark.parametrize(("rows", "inputs", "group"), SHAPES)
@pytest.mark.parametrize("paired", [False, True])
def test_rows_in_pieces_fill_the_same_tiles(rows: int, inputs: int, group: int, paired: bool) -> None:
    codes, scales, _ = checkpoint(3, rows, inputs, group=group)
    filling = layout.TileLoader(layout.empty(3, rows, inputs, group, paired=paired, device="cpu"))
    filling.tiles.data.fill_(255)
    for matrix in range(3):
        for first, last in ((0, 5), (5, 6), (6, rows)):
            filling.put(first, codes[matrix, first:last], scales[matrix, first:last], matrix)
    assert torch.equal(filling.tiles.data, layout.repack(codes, scales, paired=paired).data)


def test_random_tiles_have_the_deviation_asked_for() -> None:
    made = layout.random(4, 256, 512, 128, 0.3, device="cpu", seed=5)
    values = layout.dequantize(made)
    assert values.std().item() == pytest.approx(0.3, rel=0.02)
    assert abs(values.mean().item()) < 0.01
    assert abs(values.mean(-1)).max() < 0.1  # of no row either
    assert torch.equal(made.data, layout.random(4, 256, 512, 128, 0.3, device="cpu", seed=5).data)
    assert not torch.equal(made.data[0], made.data[1])
    assert not torch.equal(made.data, layout.random(4, 256, 512, 128, 0.3, device="cpu", seed=6).data)


def test_parts_share_memory() -> None:
    codes, scales, weights = checkpoint(4, 16, 128, group=128)
    part = layout.repack(codes, scales).part(1, 3)
    assert part.num_matrices == 2 and torch.equal(layout.dequantize(part), weights[1:3])
    assert part.num_bytes == 2 * part.num_tiles * part.tile_bytes
