"""x @ weight.T with 4-bit weights, 1 to 64 rows: what a decode step multiplies with.

`linear_one` takes the norm before and the residual after into the kernel. Up to 8 rows stream the weights past activations in registers;
up to 64 share them between the warps of a block. Sums are made in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.kernels.cuda import driver
from windlass.kernels.cuda.layout import Tiles, dequantize

ONE = "PPPPPPPPPPPQPIIIIIff"
MANY = "PPPPPPPPQQQQIIII"
DENSE = "PPPPQQQIIIII"
SHARED_BUDGET = 112 * 1024
"""Bytes of shared memory a block may take so that the next kernel's fits beside it."""
WHOLE_BUDGET = 220 * 1024
"""Where nothing else need fit."""


def divisor(n: int, most: int) -> int:
    return next(d for d in range(most, 0, -1) if n % d == 0)


@dataclass(frozen=True)
class Ring:
    """How a block's warps take the weights that stream through its shared memory."""

    teams: int
    warps: int
    """Of a team; a stage has a block for each."""
    joint: int
    """Stages that a warp takes at once."""
    stages: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return self.teams * self.warps * 32 + 32


def one_ring(weight: Tiles, segments: int = 1, choice: tuple[int, int] | None = None) -> Ring:
    """For one.cu; `choice` is teams and warps of each."""
    warps = divisor(weight.tile_blocks, 11)
    teams, warps = choice or (2 if warps <= 8 else 1, warps)
    stage = warps * weight.block_bytes + 16
    fixed = segments * weight.tile_blocks * (256 + 4) + 8 + 8 * teams * warps * 64 + 128 + 128
    stages = min(32, (SHARED_BUDGET - fixed) // stage)
    return Ring(teams, warps, 1, stages, fixed + stages * stage)


def many_ring(weight: Tiles, blocks: int, unit: int, budget: int, choice: tuple[int, int] | None = None) -> Ring:
    """For many.cu; `choice` is warps and stages at once."""
    warps, joint = choice or (divisor(blocks, 16), 0)
    stage, fixed = warps * weight.block_bytes + 16, 2 * unit * warps * 640
    stages = min(24, (budget - fixed) // stage)
    joint = joint or next(j for j in (4, 2, 1) if unit * blocks // warps % j == 0 and (3 * j <= stages or j == 1))
    stages = stages // joint * joint
    return Ring(1, warps, joint, stages, fixed + stages * stage)


@dataclass(frozen=True)
class Ahead:
    """What a later kernel will read, to be fetched into the cache while this one waits."""

    data: Tensor
    num_bytes: int


def linear_one(
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    prefetch: bool = True,
    choice: tuple[int, int] | None = None,
) -> Tensor:
    """x [inputs]: fp32 with `norm`, else bf16. out [rows]: bf16 or fp32; fp32 with `residual`, which may be `out` itself."""
    ring = one_ring(weight, choice=choice)
    run = driver.kernel(
        "one.cu", ONE, shared_bytes=ring.shared_bytes, KIND=0, TEAMS=ring.teams, TEAM_WARPS=ring.warps,
        STAGES=ring.stages, TILE_BLOCKS=weight.tile_blocks, NORM=int(norm is not None), GROUP=weight.group,
    )  # fmt: skip
    grid = min(driver.num_processors(), weight.num_tiles)
    # A processor's share beyond what its ring holds; a large matrix would only push itself out of the cache.
    prefetch = prefetch and weight.data.numel() < 40e6
    run(
        (grid,), ring.threads, weight.data, x, norm, bias, residual, out, None, None, None, None, None, 0, None, 0, 0,
        weight.num_tiles, int(prefetch), int(out.dtype == torch.float32), eps, 1.0, shared_bytes=ring.shared_bytes,
    )  # fmt: skip
    return out


def num_slices(weight: Tiles) -> int:
    """Into how many slices of the inputs `linear_many` cuts: each at most 32 blocks, what a warp's registers hold."""
    return next(s for s in range(1, weight.tile_blocks + 1) if weight.tile_blocks % s == 0 and weight.tile_blocks // s <= 32)


def linear_eight(
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    unit: int = 0,
    budget: int = SHARED_BUDGET,
    choice: tuple[int, int] | None = None,
) -> Tensor:
    """x bf16 [rows, inputs], a few rows. out bf16 [rows, outputs], or fp32 [slices, rows, outputs]: sums of slices of the inputs."""
    slices = num_slices(weight)
    blocks = weight.tile_blocks // slices
    unit = unit or divisor(weight.num_tiles, 2)
    ring = many_ring(weight, blocks, unit, budget, choice)
    partial = out.dtype == torch.float32
    assert partial or slices == 1
    run = driver.kernel(
        "many.cu", MANY, shared_bytes=ring.shared_bytes, KIND=2 if partial else 0, WARPS=ring.warps, TILE_BLOCKS=blocks, UNIT=unit,
        JOINT=ring.joint, STAGES=ring.stages, ITEMS=0, GROUP=weight.group, RESIDENT=1,
    )  # fmt: skip
    run(
        (driver.num_processors(),), ring.threads, weight.data, x, bias, out, None, None, None, None, blocks * weight.block_bytes,
        weight.tile_bytes, out.stride(-2), out.stride(0), x.stride(0), weight.num_tiles // unit, slices, x.shape[0],
        shared_bytes=ring.shared_bytes,
    )  # fmt: skip
    return out


def dense_slices(weight: Tiles) -> int:
    """Slices of the inputs that fill the device's processors once."""
    groups = -(-weight.num_tiles // 8)
    fitting = [
        s for s in range(1, weight.tile_blocks + 1) if weight.tile_blocks % s == 0 and groups * s <= driver.num_processors()
    ]
    return max(fitting, default=1)


def linear_dense(
    x: Tensor, weight: Tiles, out: Tensor, *, bias: Tensor | None = None, slices: int = 1, stage_blocks: int = 0
) -> Tensor:
    """As `linear_eight` for up to 64 rows; out fp32 [slices, rows, outputs] where there are several slices."""
    columns = 2 if x.shape[0] <= 16 else 4 if x.shape[0] <= 32 else 8
    stage_blocks = stage_blocks or divisor(weight.tile_blocks // slices, 2)
    stage_bytes = stage_blocks * 8 * weight.block_bytes + columns * 8 * (stage_blocks * 256 + 16)
    stages = min(8, WHOLE_BUDGET // (stage_bytes + 16))
    shared = max(stages * (stage_bytes + 16), columns * 8 * 132 * 4)
    partial = out.dtype == torch.float32
    assert partial or slices == 1
    run = driver.kernel(
        "dense.cu",
        DENSE,
        shared_bytes=shared,
        KIND=2 if partial else 0,
        COLUMNS=columns,
        STAGES=stages,
        STAGE_BLOCKS=stage_blocks,
        GROUP=weight.group,
    )
    run(
        (-(-weight.num_tiles // 8) * slices,), 416, weight.data, x, bias, out, weight.tile_bytes, out.stride(-2), out.stride(0),
        x.stride(0), weight.num_tiles, slices, weight.tile_blocks // slices, x.shape[0], shared_bytes=shared,
    )  # fmt: skip
    return out


def linear_reference(x: Tensor, weight: Tiles, *, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    result = x.float() @ dequantize(weight)[0].T
    result = result if bias is None else result + bias
    return result if residual is None else result + residual


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
