"""Rows of ggml's blocks in the form of core/ggml/forms.py, and back to numbers. Lossless. Plain PyTorch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import log2

import torch
from torch import Tensor

from windlass.core.ggml.forms import FORMS, FP4_DOUBLED, IQ4_VALUES, Form
from windlass.core.ggml.grids import LENGTHS, grid
from windlass.errors import BadInput

Parts = tuple[Tensor, Tensor, Tensor]
"""Of every block: halves (uint8 [n, 2 * halves]), singles (uint8 [n, singles]) and words (int32 [n, words])."""
BYTES = 0x01010101
TABLES = {"iq4_nl": IQ4_VALUES, "iq4_xs": IQ4_VALUES, "mxfp4": FP4_DOUBLED}
ZERO = {"q3_k": 4, "q6_k": 32, "q5_0": 16}
"""The code that stands for zero."""


def formed(kind: str, rows: Tensor) -> Tensor:
    """Rows of the file (uint8 [n, blocks * stored bytes]) to uint8 [n, blocks * form bytes]."""
    form = FORMS[kind]
    if rows.dtype is not torch.uint8 or rows.dim() != 2 or rows.shape[1] % form.stored_bytes:
        raise BadInput(f"expected rows of whole {form.stored_bytes}-byte blocks (uint8), got {rows.dtype} {tuple(rows.shape)}")
    if not len(rows):
        return rows.new_empty((0, rows.shape[1] // form.stored_bytes * form.num_bytes))
    halves, singles, words = _PARTS[kind](rows.reshape(-1, form.stored_bytes))
    joined = torch.cat((halves, singles, words.contiguous().view(torch.uint8)), dim=1)
    return joined.view(len(rows), -1)


def check_blocks(form: Form, num_in: int, blocks: Tensor) -> None:
    """Whether these are rows of the file."""
    row_bytes = num_in // form.elements * form.stored_bytes
    if blocks.dtype is not torch.uint8 or blocks.dim() != 2 or blocks.shape[1] != row_bytes:
        raise BadInput(f"rows of {num_in} inputs take {row_bytes} bytes each, not {tuple(blocks.shape)} of {blocks.dtype}")


def numbers(kind: str, rows: Tensor) -> Tensor:
    """uint8 [n, blocks * form bytes] to fp32 [n, in]: scale times code rounds first, then the minimum is taken away, as in ggml's reference."""
    form = FORMS[kind]
    blocks = rows.reshape(-1, form.num_bytes)
    first, second = 2 * form.halves, 2 * form.halves + form.singles
    halves = blocks[:, :first].flatten().view(torch.float16).view(len(blocks), form.halves).float()
    words = _aligned(blocks[:, second:])
    values = _grid_numbers if kind.startswith(("iq2", "iq3")) else _code_numbers
    return values(kind, halves, blocks[:, first:second], words).reshape(len(rows), -1)


def randomize_numbers(kind: str, rows: Tensor, deviation: float) -> None:
    """Gives formed rows of random bytes numbers such that weights have about the given standard deviation; for benchmarks."""
    form = FORMS[kind]
    blocks = rows.view(-1, form.num_bytes)
    if not form.halves:
        blocks[:, 0] = 127 + round(log2(deviation / 2.7))  # the deviation of 16 values of E2M1
        return
    if kind in ("q4_k", "q5_k"):
        blocks[:, 2 * form.halves : 2 * form.halves + form.singles] &= 63
    ones = torch.ones((len(blocks), form.halves), dtype=torch.float16, device=rows.device)
    blocks[:, : 2 * form.halves] = ones.view(torch.uint8)
    unit = numbers(kind, blocks[:64].flatten().view(1, -1)).std().item()
    blocks[:, : 2 * form.halves] = (ones * (deviation / unit)).view(torch.uint8)


def interleave(form: Form, rows: Tensor, across: int) -> Tensor:
    """uint8 [panels * across, blocks * form bytes] to [panels, blocks, across * form bytes]: each number and word of a block of `across` rows
    lies next to its neighbours'."""
    blocks = rows.view(-1, across, rows.shape[1] // form.num_bytes, form.num_bytes)
    parts = (_across(part, size) for part, size in zip(blocks.split(_sizes(form), dim=-1), (2, 1, 4), strict=True))
    return torch.cat(list(parts), dim=-1)


def _across(part: Tensor, size: int) -> Tensor:
    """[panels, across, blocks, count * size] to [panels, blocks, count * across * size]."""
    return part.unflatten(-1, (part.shape[-1] // size, size)).permute(0, 2, 3, 1, 4).flatten(2)


def separate(form: Form, panels: Tensor, across: int) -> Tensor:
    """The inverse of `interleave`."""
    parts = panels.split([size * across for size in _sizes(form)], dim=-1)
    rows = [
        part.unflatten(-1, (part.shape[-1] // (across * size), across, size)).permute(0, 3, 1, 2, 4).flatten(3)
        for part, size in zip(parts, (2, 1, 4), strict=True)
    ]
    return torch.cat(rows, dim=-1).flatten(0, 1).flatten(1)


def _sizes(form: Form) -> list[int]:
    return [2 * form.halves, form.singles, 4 * form.words]


# --- codes to words and back. Chunks are int32 [n, blocks of 32, 8]


def _chunks(codes: Tensor) -> Tensor:
    """Codes of a byte each, uint8 [n, in]."""
    return codes.contiguous().view(torch.int32).view(len(codes), -1, 8)


def _low(chunks: Tensor) -> Tensor:
    kept = chunks & 15 * BYTES
    return kept[..., 0::2] | kept[..., 1::2] << 4


def _pairs(chunks: Tensor) -> Tensor:
    kept = (chunks & 3 * BYTES).unflatten(-1, (2, 4))
    return kept[..., 0] | kept[..., 1] << 2 | kept[..., 2] << 4 | kept[..., 3] << 6


def _bits(chunks: Tensor) -> Tensor:
    kept = chunks & BYTES
    total = kept[..., 0]
    for chunk in range(1, 8):
        total = total | kept[..., chunk] << chunk
    return total.unsqueeze(-1)


def _from_low(words: Tensor) -> Tensor:
    return torch.stack((words & 15 * BYTES, words >> 4 & 15 * BYTES), dim=-1).flatten(-2)


def _from_pairs(words: Tensor) -> Tensor:
    return torch.stack([words >> 2 * k & 3 * BYTES for k in range(4)], dim=-1).flatten(-2)


def _from_bits(words: Tensor) -> Tensor:
    return torch.cat([words >> chunk & BYTES for chunk in range(8)], dim=-1)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth(packed: Tensor) -> Tensor:
    """Four bytes of bits to 32 bytes."""
    return (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).flatten(1)


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """[.., n] to [.., shifts, n]."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    return packed.unsqueeze(-2) >> by & mask


# --- one function per type of block: the file's bytes to parts


def _k_scales(packed: Tensor) -> Tensor:
    """Eight scales and eight minimums of six bits in 12 bytes (ggml-quants.c, get_scale_min_k4)."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return torch.cat((low & 63, rest & 15 | low >> 6 << 4, high & 63, rest >> 4 | high >> 6 << 4), dim=1)


def _q4_k(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return blocks[:, :4], _k_scales(blocks[:, 4:16]), _low(_chunks(codes)).flatten(1)


def _q5_k(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1)
    fifth = _shifted(blocks[:, 16:48], tuple(range(8)), 1).flatten(1)
    words = torch.cat((_low(_chunks(codes)), _bits(_chunks(fifth))), dim=-1)
    return blocks[:, :4], _k_scales(blocks[:, 4:16]), words.flatten(1)


def _q6_k(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3).flatten(1)
    words = torch.cat((_low(_chunks(codes)), _pairs(_chunks(high))), dim=-1)
    return blocks[:, 208:], blocks[:, 192:208], words.flatten(1)


def _two_bits(packed: Tensor) -> Tensor:
    return _chunks(_shifted(packed.reshape(len(packed), -1, 32), (0, 2, 4, 6), 3).flatten(1))


def _q2_k(blocks: Tensor) -> Parts:
    return blocks[:, 80:], blocks[:, :16], _pairs(_two_bits(blocks[:, 16:80])).flatten(1)


def _q3_k(blocks: Tensor) -> Parts:
    third = _chunks(_shifted(blocks[:, :32], tuple(range(8)), 1).flatten(1))
    low, high = _nibbles(blocks[:, 96:104]), _shifted(blocks[:, 104:108], (0, 2, 4, 6), 3).flatten(1)
    words = torch.cat((_pairs(_two_bits(blocks[:, 32:96])), _bits(third)), dim=-1)
    return blocks[:, 108:], (low | high << 4) - 32, words.flatten(1)  # scales in two's complement


def _q5_0(blocks: Tensor) -> Parts:
    words = torch.cat((_low(_chunks(_nibbles(blocks[:, 6:]))), _bits(_chunks(_fifth(blocks[:, 2:6])))), dim=-1)
    return blocks[:, :2], blocks[:, :0], words.flatten(1)


def _q5_1(blocks: Tensor) -> Parts:
    _, _, words = _q5_0(blocks[:, 2:])
    return blocks[:, :4], blocks[:, :0], words


def _iq4_nl(blocks: Tensor) -> Parts:
    return blocks[:, :2], blocks[:, :0], _low(_chunks(_nibbles(blocks[:, 2:]))).flatten(1)


def _mxfp4(blocks: Tensor) -> Parts:
    return blocks[:, :0], blocks[:, :1], _low(_chunks(_nibbles(blocks[:, 1:]))).flatten(1)


def _iq4_xs(blocks: Tensor) -> Parts:
    high = _shifted(blocks[:, 2:4].unsqueeze(-1), (0, 2, 4, 6), 3).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1)
    return blocks[:, :2], (low | high << 4) - 32, _low(_chunks(codes)).flatten(1)


def _aligned(packed: Tensor) -> Tensor:
    """uint8 [n, bytes] as int32. A copy: what lies at an odd address cannot be seen as words."""
    return packed.flatten().clone().view(torch.int32).view(len(packed), -1)


def _as_words(packed: Tensor, *counts: int) -> Tensor:
    """Words of several regions, those of one block of 32 inputs together. `counts`: words of 32 inputs in each region."""
    words = _aligned(packed)
    regions = words.split([8 * count for count in counts], dim=1)
    return torch.cat([region.reshape(-1, 8, count) for region, count in zip(regions, counts, strict=True)], dim=-1).flatten(1)


def _iq2_xxs(blocks: Tensor) -> Parts:
    return blocks[:, :2], blocks[:, :0], _as_words(blocks[:, 2:], 2)


def _iq2_xs(blocks: Tensor) -> Parts:
    return blocks[:, :2], blocks[:, 66:], _as_words(blocks[:, 2:66], 2)


def _iq2_s(blocks: Tensor) -> Parts:
    """Scales, then high bits of the indices."""
    return blocks[:, :2], torch.cat((blocks[:, 74:], blocks[:, 66:74]), dim=1), _as_words(blocks[:, 2:66], 1, 1)


def _iq3_xxs(blocks: Tensor) -> Parts:
    return blocks[:, :2], blocks[:, :0], _as_words(blocks[:, 2:], 2, 1)


def _iq3_s(blocks: Tensor) -> Parts:
    words = torch.cat((blocks[:, 2:66], blocks[:, 74:106]), dim=1)
    return blocks[:, :2], torch.cat((blocks[:, 106:], blocks[:, 66:74]), dim=1), _as_words(words, 2, 1)


_PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "q5_0": _q5_0, "q5_1": _q5_1, "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs, "mxfp4": _mxfp4, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s,
}  # fmt: skip


# --- and to numbers


@cache
def _table(kind: str, device: torch.device) -> Tensor:
    """Values of codes, or magnitudes of a grid's rows. Kept: a copy from the host cannot be part of a CUDA graph."""
    if kind in TABLES:
        return torch.tensor(TABLES[kind], dtype=torch.int8, device=device)
    name = kind.upper()
    return torch.frombuffer(bytearray(grid(name)), dtype=torch.uint8).view(-1, LENGTHS[name]).to(device)


def _codes(kind: str, words: Tensor) -> Tensor:
    """What a code stands for before it is scaled, fp32 [n, in]."""
    per_block = FORMS[kind].words * 32 // FORMS[kind].elements
    words = words.view(len(words), -1, per_block)
    if kind in ("q2_k", "q3_k"):
        chunks = _from_pairs(words[..., :2])
        chunks = chunks | _from_bits(words[..., 2:]) << 2 if kind == "q3_k" else chunks
    else:
        chunks = _from_low(words[..., :4])
        if kind == "q6_k":
            chunks = chunks | _from_pairs(words[..., 4:]) << 4
        elif per_block == 5:
            chunks = chunks | _from_bits(words[..., 4:]) << 4
    codes = chunks.contiguous().view(torch.uint8).view(len(words), -1)
    if kind in TABLES:
        return _table(kind, words.device)[codes.int()].float()
    return codes.float() - ZERO.get(kind, 0)


def _scaled(codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """`scale`, `minimum`: of every group, [n, groups]."""
    values = codes.view(*scale.shape, -1) * scale.unsqueeze(-1)
    return (values if minimum is None else values - minimum.unsqueeze(-1)).flatten(1)


def _code_numbers(kind: str, halves: Tensor, singles: Tensor, words: Tensor) -> Tensor:
    codes, scale = _codes(kind, words), halves[:, :1]
    if kind == "q2_k":
        return _scaled(codes, scale * (singles & 15), halves[:, 1:] * (singles >> 4))
    if kind in ("q4_k", "q5_k"):
        return _scaled(codes, scale * singles[:, :8], halves[:, 1:] * singles[:, 8:])
    if kind == "mxfp4":
        return _scaled(codes, torch.ldexp(torch.ones_like(singles, dtype=torch.float32), singles.int() - 128))
    if kind == "q5_1":
        return _scaled(codes, scale, -halves[:, 1:])
    return _scaled(codes, scale * singles.contiguous().view(torch.int8) if singles.shape[1] else scale)


def signs_of(words: Tensor) -> Tensor:
    """Four times seven signs in a word, the eighth such that the number of negative ones is even: int32 [.., 4] of eight bits."""
    seven = words.unsqueeze(-1) >> 7 * torch.arange(4, device=words.device) & 127
    return _with_parity(seven)


def _with_parity(seven: Tensor) -> Tensor:
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    return seven | (parity ^ parity >> 1) << 7 & 128


def _bytes_of(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.uint8).view(*words.shape[:-1], -1).int()


def _grid_numbers(kind: str, halves: Tensor, singles: Tensor, words: Tensor) -> Tensor:
    words = words.view(len(words), 8, -1)
    halved = torch.stack((singles & 15, singles >> 4), dim=-1).int()  # two scales of a byte
    high = singles[:, -8:].int().unsqueeze(-1) if kind.endswith("_s") else None
    if kind == "iq2_xxs":
        index, signs, scale = _bytes_of(words[..., :1]), signs_of(words[..., 1]), (2 * (words[..., 1] >> 28 & 15) + 1) * 0.125
    elif kind == "iq2_xs":
        both = words.contiguous().view(torch.int16).int() & 0xFFFF
        index, signs, scale = both & 511, _with_parity(both >> 9), (2 * halved.flatten(1) + 1) * 0.125
    elif kind == "iq2_s":
        assert high is not None
        top = high >> 2 * torch.arange(4, device=words.device) & 3
        index, signs = _bytes_of(words[..., :1]) | top << 8, _bytes_of(words[..., 1:])
        scale = (2 * halved[:, :8].flatten(1) + 1) * 0.125
    elif kind == "iq3_xxs":
        index, signs, scale = _bytes_of(words[..., :2]), signs_of(words[..., 2]), (2 * (words[..., 2] >> 28 & 15) + 1) * 0.25
    else:
        assert high is not None
        index = _bytes_of(words[..., :2]) | (high >> torch.arange(8, device=words.device) & 1) << 8
        signs, scale = _bytes_of(words[..., 2:]), (2 * halved[:, :4].flatten(1) + 1).float()
    magnitudes = _table(kind, words.device)[index].flatten(1).float()
    negative = (signs.unsqueeze(-1) >> torch.arange(8, device=words.device) & 1).flatten(1).bool()
    return _scaled(torch.where(negative, -magnitudes, magnitudes), halves[:, :1] * scale)
