"""x @ weight.T with 4-bit weights.

`linear_few` (1 to 4 rows) fuses the norm before and the residual after. Up to 8 rows stream the weights past activations in registers; more rows use
Hopper's warpgroup matrix instructions (WGMMA). Sums are made in a fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.runtime.kernels.cuda import driver
from windlass.runtime.kernels.cuda.layout import Tiles

ONE = "PPPPPPPPPPPIIIffII"
MANY = "PPPPPPPPQQQQIIII"
WIDE = "PPPPPPPPPQQIIIII"
SHARED_BUDGET = 112 * 1024
"""Shared memory of a thread block that leaves room for the next kernel's."""
ONE_BUDGET, FINAL_BUDGET = 136 * 1024, 200 * 1024
"""For one.cu: kernels that begin with a norm, and those that end with the residual. Large rings gained more than room for the next kernel's
blocks (docs/reference/cuda-notes.md)."""
WHOLE_BUDGET = 220 * 1024
"""Where nothing else needs shared memory."""
PRODUCT = 1
"""Default arithmetic of many.cu: 0 bf16, 1 integer products with 16-bit fixed-point activations."""
PAIRS = True
"""Default for up to 64 rows: whether pairs of blocks share the inputs of 256 rows of weights, in units of 16, 32 or 64 rows."""


LEAST_WARPS = 4
"""Of a thread block; one alone would hold all of its activations, and spill them."""


def divisor(n: int, most: int) -> int:
    return next(d for d in range(most, 0, -1) if n % d == 0)


@dataclass(frozen=True)
class Ring:
    """How a thread block's warps consume the weights that stream through its shared memory."""

    teams: int
    warps: int
    """Of a team; a stage has a block for each."""
    joint: int
    """Stages that a warp consumes at once."""
    stages: int
    shared_bytes: int
    producers: int = 1
    """Producer warps, or warps that release their registers."""

    @property
    def threads(self) -> int:
        return (self.teams * self.warps + self.producers) * 32


FEW_ROWS = 4
"""The most rows of one.cu: a product has eight columns, and a row takes two."""
LEAST_RING_BYTES = 64 * 1024
"""Of weights under way, for several rows: their activations lie in shared memory too."""


def one_ring(
    weight: Tiles, segments: int = 1, choice: tuple[int, int] | None = None, budget: int = ONE_BUDGET, rows: int = 1
) -> Ring:
    """For one.cu; `choice` is teams and warps of each; `rows` of x."""
    warps = divisor(weight.tile_blocks, 11)
    teams, warps = choice or (2 if warps <= 8 and segments * weight.tile_blocks // warps >= 2 else 1, warps)
    stage = warps * weight.block_bytes + 16 + 4
    held = 8 if rows <= 2 else 4
    fixed = segments * weight.tile_blocks * (256 + 4 + 8 * (128 // weight.group)) * rows + 8 + held * teams * warps * 64 * rows
    fixed += 128 + 128 + 32 if rows == 1 else 128 + 32 + rows * (128 + 2 * 33 * 4)
    stages = min(32, (budget - fixed) // stage) // teams * teams
    return Ring(teams, warps, 1, stages, fixed + stages * stage)


def takes_few(weight: Tiles, rows: int, segments: int = 1, budget: int = ONE_BUDGET) -> bool:
    """Whether shared memory holds the activations of so many rows, and enough weights beside them."""
    ring = one_ring(weight, segments, None, budget, rows)
    return rows == 1 or ring.stages * ring.warps * weight.block_bytes >= LEAST_RING_BYTES


def many_ring(
    weight: Tiles,
    blocks: int,
    unit: int,
    budget: int,
    choice: tuple[int, int] | None = None,
    *,
    columns: int = 1,
    resident: int = 1,
) -> Ring:
    """For many.cu; `choice` is warps and stages at once. Activations of 16 rows fill the registers of 8 warps."""
    warps, joint = choice or (divisor(blocks, 16 if columns == 1 or blocks <= 16 else 8), 0)
    stage, fixed = warps * weight.block_bytes + 16, 2 * unit * columns * warps * 640
    stages = min(24, (budget - fixed) // stage)
    joint = joint or next(j for j in (4, 2, 1) if unit * blocks // warps % j == 0 and (3 * j <= stages or j == 1))
    stages = stages // joint * joint
    producers = 4 if columns > 1 and warps % 4 == 0 and warps >= 8 and resident == 1 else 1
    return Ring(1, warps, joint, stages, fixed + stages * stage, producers)


def counter() -> Tensor:
    return _counter(torch.cuda.current_device())


@functools.cache
def _counter(device: int) -> Tensor:
    """The tile counter of one.cu, zero between launches. One is enough, since only one kernel at a time uses it."""
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")


def fixed_tiles(ring: Ring, tile_blocks: int, tiles: int, grid: int) -> int:
    """Statically assigned tiles per block: as many as its ring holds, so that their loads start before the counter can be used."""
    return max(1, min(ring.stages * ring.warps // tile_blocks, tiles // grid)) if tiles >= grid else 1


def linear_few(
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    budget: int = 0,
    choice: tuple[int, int] | None = None,
) -> Tensor:
    """x [1 to 4 rows, inputs]: fp32 with `norm`, else bf16. out [rows, outputs]: bf16 or fp32; fp32 with `residual`, which may be `out` itself."""
    rows = x.shape[0]
    assert residual is None or residual.stride(0) == out.stride(0)
    ring = one_ring(weight, 1, choice, budget or (FINAL_BUDGET if norm is None else ONE_BUDGET), rows)
    run = driver.kernel(
        "one.cu", ONE, shared_bytes=ring.shared_bytes, KIND=0, TEAMS=ring.teams, TEAM_WARPS=ring.warps,
        STAGES=ring.stages, TILE_BLOCKS=weight.tile_blocks, NORM=int(norm is not None), GROUP=weight.group, ROWS=rows,
    )  # fmt: skip
    grid = min(driver.num_processors(), weight.num_tiles)
    fixed = fixed_tiles(ring, weight.tile_blocks, weight.num_tiles, grid)
    run(
        (grid,), ring.threads, weight.data, x, norm, bias, residual, out, None, None, None, None, counter(),
        weight.num_tiles, fixed, int(out.dtype == torch.float32), eps, 1.0, x.stride(0), out.stride(0), shared_bytes=ring.shared_bytes,
    )  # fmt: skip
    return out


def num_slices(weight: Tiles) -> int:
    """Split-K slices of `linear_eight`: each at most 32 blocks, and, where that can be, so many that several warps share them evenly."""
    fitting = [s for s in range(1, weight.tile_blocks + 1) if weight.tile_blocks % s == 0 and weight.tile_blocks // s <= 32]
    return next((s for s in fitting if divisor(weight.tile_blocks // s, 16) >= LEAST_WARPS), fitting[0])


def linear_eight(
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    unit: int = 0,
    budget: int = 0,
    choice: tuple[int, int] | None = None,
    product: int | None = None,
    columns: int = 1,
) -> Tensor:
    """x bf16 [rows, inputs], a few rows. out bf16 [rows, outputs], or fp32 [slices, rows, outputs]: sums of slices of the inputs.

    Weights are read once for every 8 * `columns` (1 or 2) rows.
    """
    slices = num_slices(weight)
    blocks = weight.tile_blocks // slices
    unit = unit or divisor(weight.num_tiles, 2)
    ring = many_ring(weight, blocks, unit, budget or (SHARED_BUDGET if columns == 1 else WHOLE_BUDGET), choice, columns=columns)
    partial = out.dtype == torch.float32
    assert partial or slices == 1
    run = driver.kernel(
        "many.cu", MANY, shared_bytes=ring.shared_bytes, KIND=2 if partial else 0, WARPS=ring.warps, TILE_BLOCKS=blocks, UNIT=unit,
        JOINT=ring.joint, STAGES=ring.stages, ITEMS=0, GROUP=weight.group, RESIDENT=1, COLUMNS=columns,
        PRODUCT=PRODUCT if product is None else product,
    )  # fmt: skip
    run(
        (driver.num_processors(),), ring.threads, weight.data, x, bias, out, None, None, None, None, blocks * weight.block_bytes,
        weight.tile_bytes, out.stride(-2), out.stride(0), x.stride(0), weight.num_tiles // unit, slices, x.shape[0],
        shared_bytes=ring.shared_bytes,
    )  # fmt: skip
    return out


def wide_slices(weight: Tiles, rows: int = 64) -> int:
    """Split-K slices that fill the device once, for this many rows of x."""
    groups = -(-weight.num_tiles // 8) if rows <= 64 else -(-weight.num_tiles // 16) * -(-rows // 128)
    fitting = [
        s for s in range(1, weight.tile_blocks + 1) if weight.tile_blocks % s == 0 and groups * s <= driver.num_processors()
    ]
    return max(fitting, default=1)


def wide_kernel(
    kind: int, weight: Tiles, rows: int, blocks: int, *, items: int, deep: int = 1, cluster: int = 1
) -> tuple[driver.Kernel, int]:
    """wide.cu for units of `rows` rows of x (16, 32, 64, 128, 144, 160 or 256) and 128 * deep rows of weights, and its bytes of shared memory."""
    exact = rows <= (64 if deep == 1 or cluster > 1 else 32)
    # Copies of less than 2 KB are slow, and weights are most of what few rows need.
    stage_blocks = 2 if exact and blocks % 2 == 0 else 1
    stage_bytes = stage_blocks * rows * 256 + -(-8 * deep * stage_blocks * weight.block_bytes // 1024) * 1024
    stages = min(8, WHOLE_BUDGET // (stage_bytes + 20))
    shared = stages * (stage_bytes + 20) + rows * 4
    run = driver.kernel(
        "wide.cu", WIDE, shared_bytes=shared, KIND=kind, N=rows, STAGES=stages, STAGE_BLOCKS=stage_blocks, ITEMS=items, DEEP=deep,
        EXACT=int(exact), CLUSTER=cluster, GROUP=weight.group,
    )  # fmt: skip
    return run, shared


def wide_unit(rows: int, weight: Tiles, slices: int) -> tuple[int, int, int]:
    """Rows of x, rows of weights in units of 128, and blocks that share the inputs of such a unit."""
    if rows > 64:
        return 128, 2, 1
    if not PAIRS or weight.tile_blocks % (2 * slices):
        return 64, 1, 1
    return next(n for n in (16, 32, 64) if rows <= n), 2, 2


def linear_wide(
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    slices: int = 1,
    unit: tuple[int, int, int] | None = None,
) -> Tensor:
    """x bf16 [rows, inputs], any number of rows, best from 16. out bf16 [rows, outputs], or fp32 [slices, rows, outputs].

    `unit` as of `wide_unit`.
    """
    rows, deep, cluster = unit or wide_unit(x.shape[0], weight, slices)
    blocks, partial = weight.tile_blocks // (slices * cluster), out.dtype == torch.float32
    assert (partial or slices == 1) and blocks * slices * cluster == weight.tile_blocks
    run, shared = wide_kernel(2 if partial else 0, weight, rows, blocks, items=0, deep=deep, cluster=cluster)
    units = -(-weight.num_tiles // (8 * deep)) * slices * cluster * -(-x.shape[0] // rows)
    grid = units if cluster > 1 else min(units, driver.num_processors())
    run(
        (grid,), 384, driver.rows_map(weight.data, 8 * deep), x, None, bias, out, None, None, None, None, out.stride(-2), out.stride(0),
        x.stride(0), weight.num_tiles, slices * cluster, blocks, x.shape[0], shared_bytes=shared,
    )  # fmt: skip
    return out


def linear_parts(x: Tensor, weight: Tiles) -> Tensor:
    """x @ weight.T as parts that `norm.add_norm` adds up: fp32 [slices, rows, outputs], or bf16 where rows alone fill the device."""
    rows = x.shape[0]
    few = rows <= 8
    slices = num_slices(weight) if few else wide_slices(weight, rows)
    whole = rows > 64 and slices == 1
    parts = torch.empty(slices, rows, weight.rows, dtype=x.dtype if whole else torch.float32, device=x.device)
    if few:
        return linear_eight(x, weight, parts)
    linear_wide(x, weight, parts[0] if whole else parts, slices=slices)
    return parts
