"""What nn.fused launches on a GPU, made of the references that stand beside the kernels: same arguments, same places for the results.

Each asserts what its kernel takes for granted (types, shapes, memory in one piece, zeros where inputs are filled up). Memory is NaN until
something is written to it. `half` is bf16 as on the device, or fp32 so that nothing is rounded.
"""

# ruff: noqa: E402 (the folder of cuda_references is put on the path first)

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from stand_ins_small import NAN, Small, plain, put
from torch import Tensor

CUDA_TESTS = str(Path(__file__).parents[2] / "runtime" / "kernels" / "cuda")
if CUDA_TESTS not in sys.path:
    sys.path.insert(0, CUDA_TESTS)

from cuda_references import norm_reference, route_reference

from windlass.core import integer_units
from windlass.runtime.kernels.cuda import attention, driver, experts, int8, layout, linear, norm, route
from windlass.runtime.kernels.cuda.int8 import RoundedRows
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.route import Routes
from windlass.runtime.nn.fused import decoder as fused
from windlass.runtime.nn.fused import feed_forward as fused_ffn
from windlass.runtime.nn.fused import layer as fused_layer

PROCESSORS = 132


class Torch:
    """The module, but for its bfloat16 and for what lies in memory that nothing was written to."""

    def __init__(self, half: torch.dtype) -> None:
        self.bfloat16 = half

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, **how: Any) -> Tensor:
        made = torch.empty(*shape, **how)
        return made.fill_(NAN if made.is_floating_point() else 2**30)


class StandIns(Small):
    def __init__(self, half: torch.dtype) -> None:
        super().__init__(half)
        self.called: set[str] = set()
        self.item_rows: set[int] = set()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for module, names in LAUNCHES.items():
            for name in names:
                patch.setattr(module, name, self._counted(name))
        patch.setattr(driver, "num_processors", lambda: PROCESSORS)
        patch.setattr(driver, "kernel", _no_kernel)
        for module in (fused, fused_ffn, fused_layer, int8, route):
            patch.setattr(module, "torch", Torch(self.half))

    def _counted(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.called.add(name)
            return getattr(self, name)(*given, **named)

        return call

    def _dense(self, weight: Tiles) -> Tensor:
        """fp32 [matrices, rows, width]: what fills inputs up is zero."""
        key = weight.data.data_ptr()
        if key not in self._known:
            found = layout.dequantize(weight)
            # With its tensor, so that no other one has this address as long as it is known.
            self._known[key] = weight.data, torch.nn.functional.pad(found, (0, weight.width - weight.inputs))
        return self._known[key][1]

    def _product(self, x: Tensor, weight: Tiles, matrix: int = 0) -> Tensor:
        assert x.shape[-1] == weight.width and x.stride(-1) == 1
        assert not x[..., weight.inputs :].any(), "filled up with something"
        return x.float() @ self._dense(weight)[matrix].T

    # --- linear

    def linear_few(
        self, x: Tensor, weight: Tiles, out: Tensor, *, bias: Any = None, residual: Any = None, norm: Any = None, eps: float = 0.0
    ) -> Tensor:
        assert x.dim() == 2 and 1 <= len(x) <= 4 and out.shape == (len(x), weight.rows) and linear.takes_few(weight, len(x))
        plain(torch.float32 if norm is not None else self.half, x)
        plain(torch.float32 if residual is not None else out.dtype, out)
        if norm is not None:
            plain(torch.float32, norm)
            assert norm.shape == (weight.width,)  # the mean is over all of them
            x = norm_reference(x, norm, eps)
        return put(out, added(self._product(x, weight), bias, residual))

    def linear_eight(self, x: Tensor, weight: Tiles, out: Tensor, *, bias: Tensor | None = None) -> Tensor:
        slices = linear.num_slices(weight)
        assert x.shape[0] <= 8 and weight.tile_blocks // slices <= 32  # what registers hold
        return self._sliced(x, weight, out, bias, slices)

    def linear_wide(self, x: Tensor, weight: Tiles, out: Tensor, *, bias: Tensor | None = None, slices: int = 1) -> Tensor:
        return self._sliced(x, weight, out, bias, slices)

    def _sliced(self, x: Tensor, weight: Tiles, out: Tensor, bias: Tensor | None, slices: int) -> Tensor:
        """Sums of slices of the inputs, or whole rows."""
        assert x.dtype == self.half and x.dim() == 2 and out.stride(-1) == 1
        if out.dim() == 2:
            assert out.dtype == self.half and slices == 1 and out.shape == (len(x), weight.rows)
            return put(out, added(self._product(x, weight), bias, None))
        assert out.dtype == torch.float32 and bias is None and out.shape == (slices, len(x), weight.rows)
        assert weight.tile_blocks % slices == 0
        width = weight.width // slices
        self._product(x, weight)
        parts = [
            part.float() @ rows.T for part, rows in zip(x.split(width, 1), self._dense(weight)[0].split(width, 1), strict=True)
        ]
        return put(out, torch.stack(parts))

    # --- int8: rows are rounded by nothing here, so that all else can be compared exactly

    def empty_rows(self, rows: int, inputs: int, device: torch.device) -> RoundedRows:
        return RoundedRows(torch.full((rows, inputs), NAN, dtype=self.half, device=device), torch.empty(0))

    def quantize_rows(self, x: Tensor) -> RoundedRows:
        assert x.dtype == self.half and x.dim() == 2 and x.stride(1) == 1 and x.shape[1] % 128 == 0 and x.stride(0) % 2 == 0
        return RoundedRows(x, torch.empty(0))

    def _all_rows(
        self, kind: int, x: RoundedRows, weight: Tiles, out: Tensor, bias: Tensor | None, way: integer_units.Cut
    ) -> Tensor:
        assert weight.group == int8.GROUP and any(way[:2] == known[:2] for known in integer_units.UNIT_KINDS)
        if kind == 1:
            assert bias is None and way.slices == 1
            return self._gate_up(x.codes, weight, out, route.all_rows(len(x.codes), 64, x.codes.device))
        return self._sliced(x.codes, weight, out, bias, way.slices)

    def gate_up(self, x: RoundedRows, weight: Tiles, out: Tensor, routes: Routes) -> Tensor:
        assert weight.group == int8.GROUP and routes.item_rows.shape[1] in integer_units.SHAPES
        return self._gate_up(x.codes, weight, out, routes)

    def down(self, x: RoundedRows, weight: Tiles, out: Tensor, routes: Routes) -> Tensor:
        assert weight.group == int8.GROUP and routes.item_rows.shape[1] in integer_units.SHAPES and out.dtype == self.half
        return self._down(x.codes, weight, out, routes)

    # --- experts

    def gate_up_few(
        self, x: Tensor, norm: Tensor, weight: Tiles, out: Tensor, logits: Tensor, correction: Tensor | None, routes: Routes,
        *, eps: float, routed_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """The shared expert first."""
        plain(torch.float32, x, norm)
        plain(self.half, out)
        rows, slots, width = len(x), routes.num_active + routes.num_shared, weight.rows // 2
        assert x.shape[1:] == norm.shape == (weight.width,) and weight.paired and 1 <= rows <= 4
        assert rows * routes.num_active <= 32, "a warp has so many lanes"
        assert weight.num_matrices == routes.num_experts + routes.num_shared
        assert out.shape == (rows, slots * width) or (slots == 1 and out.shape[1] >= width)
        chosen: list[list[int]] = [[]] * rows
        if routes.num_active:
            plain(torch.float32, logits)
            ids, weights = route_reference(logits, correction, routes.num_active, routed_scale, softmax=routes.softmax)
            routes.ids.fill_(-1), routes.weights.fill_(NAN)
            routes.ids[:rows], routes.weights[:rows] = ids, weights
            chosen = ids.tolist()
        normed = norm_reference(x, norm, eps)
        for row, experts_ in enumerate(chosen):
            for slot, expert in enumerate([routes.num_experts] * routes.num_shared + experts_):
                put(out[row, slot * width : (slot + 1) * width], silu_up(self._product(normed[row], weight, expert)))
        return out

    def down_few(self, x: Tensor, weight: Tiles, out: Tensor, routes: Routes, *, residual: Tensor | None = None) -> Tensor:
        rows, slots = len(x), routes.num_active + routes.num_shared
        plain(self.half, x)
        plain(torch.float32, out)
        assert x.shape == (rows, slots * weight.width) and out.shape == (rows, weight.rows) and 1 <= rows <= 4
        assert slots <= 16, "one.cu holds so many factors"
        total = torch.zeros_like(out)
        for row in range(rows):
            chosen = [(routes.num_experts, 1.0)] * routes.num_shared
            if routes.num_active:
                chosen += zip(routes.ids[row].tolist(), routes.weights[row].tolist(), strict=True)
            for part, (expert, factor) in zip(x[row].split(weight.width), chosen, strict=True):
                total[row] += factor * self._product(part, weight, expert)
        return put(out, added(total, None, residual))

    def gate_up_many(self, x: Tensor, weight: Tiles, out: Tensor, routes: Routes) -> Tensor:
        assert routes.item_rows.shape[1] in (8, 16)
        return self._gate_up(x, weight, out, routes)

    def gate_up_wide(self, x: Tensor, weight: Tiles, out: Tensor, routes: Routes, *, deep: int = 2) -> Tensor:
        assert routes.item_rows.shape[1] in (16, 32, 64, 128, 160) and deep in (1, 2)
        return self._gate_up(x, weight, out, routes)

    def _gate_up(self, x: Tensor, weight: Tiles, out: Tensor, routes: Routes) -> Tensor:
        width = weight.rows // 2
        assert x.dtype == out.dtype == self.half and weight.paired and out.stride(1) == 1 and out.shape[1] >= width
        assert len(out) == len(x) * (routes.num_active + routes.num_shared)
        out[:, :width] = NAN
        for expert, rows, places in self._items(routes):
            out[places, :width] = silu_up(self._product(x[rows], weight, expert)).to(out.dtype)
        return out

    def down_many(self, x: Tensor, weight: Tiles, out: Tensor, routes: Routes) -> Tensor:
        assert out.dtype == torch.float32
        return self._down(x, weight, out, routes)

    def down_wide(self, x: Tensor, weight: Tiles, out: Tensor, routes: Routes) -> Tensor:
        assert out.dtype == self.half
        return self._down(x, weight, out, routes)

    def _down(self, x: Tensor, weight: Tiles, out: Tensor, routes: Routes) -> Tensor:
        assert x.dtype == self.half and out.shape == (len(x), weight.rows) and out.stride(1) == 1
        out.fill_(NAN)
        for expert, _, places in self._items(routes):
            out[places] = self._product(x[places], weight, expert).to(out.dtype)
        return out

    def _items(self, routes: Routes) -> list[tuple[int, Tensor, Tensor]]:
        found: list[tuple[int, Tensor, Tensor]] = []
        self.item_rows.add(routes.item_rows.shape[1])
        for item in range(int(routes.num_items[0])):
            rows, places = routes.item_rows[item], routes.item_places[item]
            assert torch.equal(rows >= 0, places >= 0)
            found.append((int(routes.item_expert[item]), rows[rows >= 0].long(), places[places >= 0].long()))
        return found


LAUNCHES: dict[ModuleType, tuple[str, ...]] = {
    linear: ("linear_few", "linear_eight", "linear_wide"),
    experts: ("gate_up_few", "down_few", "gate_up_many", "down_many", "gate_up_wide", "down_wide"),
    int8: ("empty_rows", "quantize_rows", "_all_rows", "gate_up", "down"),
    route: ("router_few", "router_many", "route_many", "choose_many"),
    attention: ("decode_attention", "rotate_store", "head_norm"),
    norm: ("add_norm", "head_one"),
}


def _no_kernel(name: str, *_: Any, **__: Any) -> None:
    raise AssertionError(f"{name} was asked for, and nothing stands in for it")


def added(product: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if bias is not None:
        plain(torch.float32, bias)
        product = product + bias
    return product if residual is None else product + residual


def silu_up(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
