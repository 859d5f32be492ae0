"""Repacking keeps every number: what the tiles hold is what the checkpoint's codes and scales say."""

from __future__ import annotations

import pytest
import torch

from windlass.errors import BadInput
from windlass.kernels.cuda import layout

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
    with pytest.raises(BadInput, match="groups of 32, 64 or 128"):
        layout.empty(1, 24, 128, 128, device="cpu")
