"""Sorts items (a row's choice of an expert) by expert on the device, and cuts them into tiles.

Tables have their maximum size, so that the host need not know the choices; unused tiles have expert -1. Every expert's program counts for
itself, so that the order is deterministic.
"""

# ruff: noqa: N803 (compile-time constants are in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
FEW_ITEMS = 512
"""Up to this many, each expert's program counts all experts' items itself, which saves a kernel launch."""


@dataclass(frozen=True)
class Dispatch:
    order: Tensor
    """int32 [items]: items sorted by expert (stable). Items of experts on other ranks are not in it."""
    tiles: Tensor
    """int32 [3, tiles]: the expert (-1: none), the first of its items in `order`, how many"""
    num_items: int
    num_tiles: int


@triton.jit(do_not_specialize=["num_items"])
def _count(counts, ids, num_items, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_items, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found += (tl.load(ids + at, mask=at < num_items, other=-1) == tl.program_id(0)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_items", "num_tiles"])
def _sort(
    order, tiles, counts, ids, num_items, num_tiles, num_experts,
    TILE: tl.constexpr, COUNTED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program per expert, and one more for the unused tiles."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    if COUNTED:
        count = tl.load(counts + experts, mask=experts < num_experts, other=0)
    else:
        count = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, num_items, CHUNK):
            at = first + tl.arange(0, CHUNK)
            chosen = tl.load(ids + at, mask=at < num_items, other=-1)
            count += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), 0)
        count = tl.where(experts < num_experts, count, 0)
    place = tl.sum(tl.where(experts < expert, count, 0), 0)
    tile = tl.sum(tl.where(experts < expert, (count + TILE - 1) // TILE, 0), 0)
    own = tl.sum(tl.where(experts == expert, count, 0), 0)
    if expert == num_experts:
        own = (num_tiles - tile) * TILE
    for number in range(0, (own + TILE - 1) // TILE):
        tl.store(tiles + tile + number, tl.where(expert == num_experts, -1, expert))
        tl.store(tiles + num_tiles + tile + number, place + number * TILE)
        tl.store(tiles + 2 * num_tiles + tile + number, tl.minimum(own - number * TILE, TILE))
    for first in range(0, num_items, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = ((tl.load(ids + at, mask=at < num_items, other=-1) == expert) & (expert < num_experts)).to(tl.int1)
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + rank - 1, at, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)


def max_tiles(num_items: int, num_experts: int, tile: int) -> int:
    """Every expert's last tile may hold a single item."""
    return min(num_items, (num_items + min(num_items, num_experts) * (tile - 1)) // tile)


def dispatch(ids: Tensor, num_experts: int, tile: int) -> Dispatch:
    """ids int32 [rows, active], contiguous; item i is a choice of row i // active."""
    items = ids.numel()
    made = Dispatch(
        order=torch.empty(items, dtype=torch.int32, device=ids.device),
        tiles=torch.empty((3, max_tiles(items, num_experts, tile)), dtype=torch.int32, device=ids.device),
        num_items=items,
        num_tiles=max_tiles(items, num_experts, tile),
    )
    counts = None
    if items > FEW_ITEMS:
        counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
        _count[(num_experts,)](counts, ids, items, BLOCK=BLOCK, num_warps=4)
    how = {"TILE": tile, "COUNTED": counts is not None, "EXPERTS": triton.next_power_of_2(num_experts), "CHUNK": 32}
    _sort[(num_experts + 1,)](
        made.order, made.tiles, counts, ids, items, made.num_tiles, num_experts,
        BLOCK=FEW_ITEMS if counts is None else BLOCK, num_warps=4, **how,
    )  # fmt: skip
    return made
