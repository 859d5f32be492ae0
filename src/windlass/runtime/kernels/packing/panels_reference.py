"""Panels in plain PyTorch: the reference for the native operations, and the fallback without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core.ggml.forms import Form
from windlass.runtime.kernels.packing import ggml_rows
from windlass.runtime.kernels.packing.panel_data import BLOCKS, PANEL_ROWS, PanelData


def dense(panels: PanelData, expert: int | None) -> Tensor:
    """fp32 [out, in]."""
    if panels.kind == "fp8":
        return _fp8_rows(panels.expert_data(expert).view(panels.shape[0], -1), panels)
    return _numbers(panels, panels.expert_data(expert).view(panels.num_panels, -1))[: panels.shape[0]]


def rows(panels: PanelData, index: Tensor) -> Tensor:
    """fp32 [len(index), in]."""
    index = index.long()
    if panels.kind == "fp8":
        return _fp8_rows(panels.expert_data(None).view(panels.shape[0], -1)[index], panels)
    wanted, place = torch.unique(index // PANEL_ROWS, return_inverse=True)
    found = _numbers(panels, panels.expert_data(None).view(panels.num_panels, -1)[wanted])
    return found[place * PANEL_ROWS + index % PANEL_ROWS]


def _numbers(panels: PanelData, memory: Tensor) -> Tensor:
    """Whole panels (uint8 [n, panel_bytes]) as numbers, [n * 16, in]."""
    if panels.form is not None:
        blocks = memory.view(len(memory), panels.num_groups, panels.group_bytes)
        return ggml_rows.numbers(panels.kind, ggml_rows.separate(panels.form, blocks, PANEL_ROWS))
    codes, scale, offset = unpack(panels, memory)
    grouped = codes.float().view(len(codes), panels.num_groups, -1)
    if panels.kind == "int4_minima":
        assert offset is not None
        return (grouped * scale.float().unsqueeze(-1) + offset.float().unsqueeze(-1)).flatten(1)
    zero = 128.0 if panels.kind == "int8" else 8.0 if offset is None else offset.float().unsqueeze(-1)
    return ((grouped - zero) * scale.float().unsqueeze(-1)).flatten(1)


def _fp8_rows(memory: Tensor, panels: PanelData) -> Tensor:
    codes = memory[:, : panels.shape[1]].contiguous().view(torch.float8_e4m3fn).float()
    scale = memory[:, panels.shape[1] :].contiguous().view(torch.float32)
    return (codes.view(len(codes), panels.num_groups, -1) * scale.unsqueeze(-1)).flatten(1)


def unpack(panels: PanelData, memory: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Whole panels to unsigned codes [n * 16, in], scales [n * 16, groups], and offsets as they are stored."""
    groups = memory.view(len(memory), panels.num_groups, panels.group_bytes)
    chunks = groups[..., : panels.codes_bytes].unflatten(-1, (-1, PANEL_ROWS, 4))
    if panels.kind != "int8":  # low nibbles are four inputs, high ones the next four
        chunks = torch.stack((chunks & 15, chunks >> 4), dim=-3).flatten(-4, -3)
    codes = chunks.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)
    numbers = groups[..., panels.codes_bytes :]
    scale_bytes = PANEL_ROWS * panels.scale_dtype.itemsize
    scale = numbers[..., :scale_bytes].contiguous().view(panels.scale_dtype)
    offset = numbers[..., scale_bytes:].contiguous() if panels.kind in ("int4_zeros", "int4_minima") else None
    if panels.kind == "int4_minima":
        assert offset is not None
        offset = offset.view(panels.scale_dtype)
    return codes, _by_row(scale), None if offset is None else _by_row(offset)


def _by_row(numbers: Tensor) -> Tensor:
    """[panels, groups, 16] to [panels * 16, groups]."""
    return numbers.transpose(1, 2).flatten(0, 1)


def pack(panels: PanelData, codes: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """The inverse of `unpack`."""
    num_panels = len(codes) // PANEL_ROWS
    chunks = codes.view(num_panels, PANEL_ROWS, panels.num_groups, -1, 4).permute(0, 2, 3, 1, 4)
    if panels.kind != "int8":
        halves = chunks.unflatten(2, (-1, 2))
        chunks = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)
    parts = [chunks.flatten(2), _bytes(scale, num_panels)]
    if offset is not None:
        parts.append(_bytes(offset, num_panels))
    return torch.cat(parts, dim=-1).flatten(1)


def _bytes(numbers: Tensor, num_panels: int) -> Tensor:
    """[panels * 16, groups] to bytes [panels, groups, 16 * size]."""
    return numbers.view(num_panels, PANEL_ROWS, -1).transpose(1, 2).contiguous().view(torch.uint8)


def put(
    panels: PanelData, to: Tensor, first_row: int, source: int, codes: Tensor, scale: Tensor | None, offset: Tensor | None
) -> None:
    """Rows into the panels that hold them, see `Panels.put` and `Panels.put_blocks`."""
    if panels.kind == "fp8":
        assert scale is not None
        memory = torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), dim=1)
        to.view(panels.shape[0], -1)[first_row : first_row + len(codes)] = memory
        return
    if panels.form is not None:
        _put_form(panels, panels.form, to, first_row, ggml_rows.formed(panels.kind, codes))
        return
    codes, scale, offset = _blocks(panels, codes) if source == BLOCKS else (_words(panels, codes), scale, offset)
    if panels.kind == "int4_zeros":
        assert offset is not None
        offset = (offset + 8).to(torch.uint8)
    first, last = first_row // PANEL_ROWS, -(-(first_row + len(codes)) // PANEL_ROWS)
    memory = to.view(panels.num_panels, -1)[first:last]
    held, start = unpack(panels, memory), first_row - first * PANEL_ROWS
    for all_rows, new in zip(held, (codes, scale, offset), strict=True):
        if all_rows is not None:
            assert new is not None
            all_rows[start : start + len(new)] = new
    memory.copy_(pack(panels, *held))


def _put_form(panels: PanelData, form: Form, to: Tensor, first_row: int, rows: Tensor) -> None:
    first, last = first_row // PANEL_ROWS, -(-(first_row + len(rows)) // PANEL_ROWS)
    memory = to.view(panels.num_panels, panels.num_groups, panels.group_bytes)[first:last]
    held, start = ggml_rows.separate(form, memory, PANEL_ROWS), first_row - first * PANEL_ROWS
    held[start : start + len(rows)] = rows
    memory.copy_(ggml_rows.interleave(form, held, PANEL_ROWS))


def _words(panels: PanelData, words: Tensor) -> Tensor:
    stored = words.contiguous().view(torch.uint8)
    return stored if panels.kind == "int8" else torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)


def _blocks(panels: PanelData, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """GGML's: numbers, then codes; of int4, byte j holds codes j and j + 16."""
    blocks = rows.view(len(rows), panels.num_groups, -1)
    scale = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    if panels.kind == "int8":
        return (blocks[..., 2:] ^ 128).flatten(1), scale, None
    codes = blocks[..., -16:]
    unpacked = torch.cat((codes & 15, codes >> 4), dim=-1).flatten(1)
    minimum = blocks[..., 2:4].contiguous().view(torch.float16).squeeze(-1) if panels.kind == "int4_minima" else None
    return unpacked, scale, minimum


def randomize(panels: PanelData, typical_scale: float, seed: int) -> None:
    """Random codes, scales from 0.5 to 1.5 times `typical_scale`."""
    draw = torch.Generator().manual_seed(seed)
    panels.data.random_(0, 256, generator=draw)
    if panels.kind == "fp8":
        memory = panels.data.view(-1, panels.row_bytes)
        memory[:, : panels.shape[1]] &= 0x87
        memory[:, : panels.shape[1]] |= 0x30
        memory[:, panels.shape[1] :] = torch.tensor([typical_scale]).view(torch.uint8).repeat(panels.num_groups)
        return
    memory = panels.data.view(-1, panels.panel_bytes)
    codes, scale, offset = unpack(panels, memory)
    scale = ((torch.rand(scale.shape, generator=draw) + 0.5) * typical_scale).to(panels.scale_dtype)
    if panels.kind == "int4_minima":
        offset = (-7.5 * scale).to(panels.scale_dtype)
    if panels.kind == "int4_zeros":
        offset = torch.randint(7, 9, scale.shape, generator=draw, dtype=torch.uint8)
    memory.copy_(pack(panels, codes, scale, offset))
