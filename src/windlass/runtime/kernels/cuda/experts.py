"""The routed feed-forward over 4-bit weights: gate and up with SiLU, down, and the weighted sum. The shared expert follows the routed ones.

1 to 4 rows: routing is fused into gate and up, the weighted sum and residual into down. 2 to 64 rows: items of 8 or 16 rows from `route_many`; each
(row, slot) has its own place for its result, and `norm.add_norm` sums them in order, so that results are deterministic.
"""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.cuda import driver, linear
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.route import Routes


def _few(kind: int, norm: int, weight: Tiles, routes: Routes, ring: linear.Ring, rows: int) -> driver.Kernel:
    return driver.kernel(
        "one.cu", linear.ONE, shared_bytes=ring.shared_bytes, KIND=kind, TEAMS=ring.teams, TEAM_WARPS=ring.warps,
        STAGES=ring.stages, TILE_BLOCKS=weight.tile_blocks, NORM=norm, GROUP=weight.group, TILES=weight.num_tiles,
        ACTIVE=routes.num_active, SHARED=routes.num_shared, EXPERTS=routes.num_experts, SOFTMAX=int(routes.softmax), ROWS=rows,
    )  # fmt: skip


def takes_few(gate_up: Tiles, down: Tiles, routes: Routes, rows: int) -> bool:
    """Whether the kernels of 1 to 4 rows take so many."""
    slots = routes.num_active + routes.num_shared
    return (
        rows * routes.num_active <= 32
        and linear.takes_few(gate_up, rows)
        and linear.takes_few(down, rows, slots, linear.FINAL_BUDGET)
    )


def gate_up_few(
    x: Tensor, norm: Tensor, weight: Tiles, out: Tensor, logits: Tensor, correction: Tensor | None, routes: Routes,
    *, eps: float, routed_scale: float = 1.0, choice: tuple[int, int] | None = None,
    budget: int = linear.ONE_BUDGET,
) -> Tensor:  # fmt: skip
    """x fp32 [1 to 4 rows, inputs]; out bf16 [rows, (shared + active) * width], the shared expert first; choices go into `routes`."""
    rows = x.shape[0]
    ring = linear.one_ring(weight, 1, choice or (1, linear.divisor(weight.tile_blocks, 16)), budget, rows)
    run = _few(1, 1, weight, routes, ring, rows)
    tiles = (routes.num_active + routes.num_shared) * weight.num_tiles
    arguments = (
        weight.data, x, norm, None, None, out, logits, correction, routes.ids, routes.weights, linear.counter()
    )  # fmt: skip
    grid = min(driver.num_processors(), tiles)
    fixed = linear.fixed_tiles(ring, weight.tile_blocks, tiles, grid)
    run(
        (grid,), ring.threads, *arguments, tiles, fixed, 0, eps, routed_scale, x.stride(0), out.stride(0),
        shared_bytes=ring.shared_bytes,
    )  # fmt: skip
    return out


def down_few(
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    routes: Routes,
    *,
    residual: Tensor | None = None,
    choice: tuple[int, int] | None = None,
    budget: int = linear.FINAL_BUDGET,
) -> Tensor:
    """x bf16 [1 to 4 rows, (shared + active) * width] as `gate_up_few` leaves it; out fp32 [rows, outputs]."""
    rows, slots = x.shape[0], routes.num_active + routes.num_shared
    assert residual is None or residual.stride(0) == out.stride(0)
    ring = linear.one_ring(weight, slots, choice or (1, linear.divisor(weight.tile_blocks, 11)), budget, rows)
    run = _few(2, 0, weight, routes, ring, rows)
    arguments = (
        weight.data, x, None, None, residual, out, None, None, routes.ids, routes.weights, linear.counter()
    )  # fmt: skip
    grid = min(driver.num_processors(), weight.num_tiles)
    fixed = linear.fixed_tiles(ring, slots * weight.tile_blocks, weight.num_tiles, grid)
    run(
        (grid,), ring.threads, *arguments, weight.num_tiles, fixed, 1, 0.0, 1.0, x.stride(0), out.stride(0),
        shared_bytes=ring.shared_bytes,
    )  # fmt: skip
    return out


def gate_up_many(
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    routes: Routes,
    *,
    unit: int = 4,
    resident: int = 1,
    choice: tuple[int, int] | None = None,
    product: int | None = None,
) -> Tensor:
    """x bf16 [rows, inputs]; out bf16 [rows * (active + shared), width]."""
    return _many(1, x, weight, out, routes, routes.item_rows, unit, resident, choice, product)


def down_many(
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    routes: Routes,
    *,
    unit: int = 8,
    resident: int = 1,
    choice: tuple[int, int] | None = None,
    product: int | None = None,
) -> Tensor:
    """x bf16 [rows * (active + shared), width]; out fp32 [rows * (active + shared), outputs], not yet weighted."""
    return _many(2, x, weight, out, routes, routes.item_places, unit, resident, choice, product)


def _many(
    kind: int,
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    routes: Routes,
    rows: Tensor,
    unit: int,
    resident: int,
    choice: tuple[int, int] | None,
    product: int | None,
) -> Tensor:
    columns = rows.shape[1] // 8
    # Accumulators of more tiles or columns than this leave no shared memory for weights.
    unit = linear.divisor(weight.num_tiles, unit if columns == 1 else min(unit, 4))
    budget = linear.WHOLE_BUDGET if resident == 1 else linear.SHARED_BUDGET
    ring = linear.many_ring(weight, weight.tile_blocks, unit, budget, choice, columns=columns, resident=resident)
    run = driver.kernel(
        "many.cu", linear.MANY, shared_bytes=ring.shared_bytes, KIND=kind, WARPS=ring.warps, TILE_BLOCKS=weight.tile_blocks, UNIT=unit,
        JOINT=ring.joint, STAGES=ring.stages, ITEMS=1, GROUP=weight.group, RESIDENT=resident, COLUMNS=columns,
        PRODUCT=linear.PRODUCT if product is None else product,
    )  # fmt: skip
    run(
        (driver.num_processors() * resident,), ring.threads, weight.data, x, None, out, routes.num_items, routes.item_expert, rows,
        routes.item_places, weight.num_tiles * weight.tile_bytes, weight.tile_bytes, out.stride(0), 0, x.stride(0),
        weight.num_tiles // unit, 1, 0, shared_bytes=ring.shared_bytes,
    )  # fmt: skip
    return out


def gate_up_wide(x: Tensor, weight: Tiles, out: Tensor, routes: Routes, *, deep: int = 2) -> Tensor:
    """As `gate_up_many` for items of 16, 32, 64, 128 or 160 rows, from `route.dispatch`."""
    return _wide(1, x, weight, out, routes, routes.item_rows, deep)


def down_wide(x: Tensor, weight: Tiles, out: Tensor, routes: Routes, *, deep: int = 2) -> Tensor:
    """As `down_many` for such items; out bf16."""
    return _wide(3, x, weight, out, routes, routes.item_places, deep)


def _wide(kind: int, x: Tensor, weight: Tiles, out: Tensor, routes: Routes, rows: Tensor, deep: int) -> Tensor:
    run, shared = linear.wide_kernel(kind, weight, rows.shape[1], weight.tile_blocks, items=1, deep=deep)
    run(
        (driver.num_processors(),), 384, driver.rows_map(weight.data, 8 * deep), x, None, None, out, routes.num_items, routes.item_expert, rows,
        routes.item_places, out.stride(0), 0, x.stride(0), weight.num_tiles, 1, weight.tile_blocks, 0,
        shared_bytes=shared,
    )  # fmt: skip
    return out
