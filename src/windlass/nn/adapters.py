"""LoRA adapters while serving: each row of a step is computed with its own, or with none (arXiv 2106.09685; mixed batches as in S-LoRA,
arXiv 2311.03285).

A matrix product of the base model runs for all rows as before; then b (a x) is added to the rows that have an adapter. Other rows keep
their bits. Steps without adapters do not come here at all: `enabled` is off while their program is recorded or run.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import BadInput
from windlass.kernels.ops.activate import reference as activate
from windlass.kernels.ops.experts import expert_product
from windlass.kernels.packing.tiered import TieredExperts
from windlass.kernels.program import program
from windlass.nn.linear import Linear
from windlass.nn.moe import Experts

Matrices = tuple[Tensor, Tensor]
"""a [rank, in] and b [out, rank], the scale included."""
RowRange = tuple[int, int, str]
"""Rows first..last of a step, and their adapter."""


class Adapters:
    """All adapters of a decoder, and which rows of the current step have which."""

    def __init__(self, widths: Mapping[str, int], device: str) -> None:
        """`widths`: rows of every matrix of the model, by our name."""
        self.widths = widths
        self.matrices: dict[str, dict[str, Matrices]] = {}
        """Adapter -> our name of a matrix -> what is added to it."""
        self.rows: list[RowRange] = []
        self.enabled = False
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self.matrices

    def add(self, name: str, matrices: Mapping[str, Matrices], decoder: nn.Module) -> None:
        """Puts the adapter's layers into the decoder where they are not yet."""
        known = _attach(decoder, self, set(matrices))
        missing = sorted(set(matrices) - known)
        if missing:
            raise BadInput(
                f"adapter {name}: {missing[0]} cannot be adapted while serving; merge the adapter into the model instead"
            )
        self.matrices[name] = {key: (a.to(self._device), b.to(self._device)) for key, (a, b) in matrices.items()}

    def remove(self, name: str) -> None:
        """Its layers stay, and add nothing. No request may have it."""
        self.matrices.pop(name, None)

    def of_rows(self, name: str) -> list[tuple[int, int, Matrices]]:
        """The rows of the step whose adapter changes this matrix."""
        found = [(first, last, self.matrices[adapter].get(name)) for first, last, adapter in self.rows]
        return [(first, last, pair) for first, last, pair in found if pair is not None]


class AdaptedLinear(nn.Module):
    """Stands for a Linear, which may be several matrices stacked."""

    def __init__(self, base: Linear, parts: list[tuple[str, int, int]], adapters: Adapters) -> None:
        """`parts`: our name of each matrix, and its columns of the result."""
        super().__init__()
        self.base, self._parts, self._adapters = base, parts, adapters

    @property
    def weight(self) -> Any:
        return self.base.weight

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        y = self.base(x, add)
        if self._adapters.enabled:
            program.call(self._add, x, y)
        return y

    def _add(self, x: Tensor, y: Tensor) -> None:
        for name, start, stop in self._parts:
            for first, last, (a, b) in self._adapters.of_rows(name):
                y[first:last, start:stop] += ((x[first:last].float() @ a.t()) @ b.t()).to(y.dtype)


class AdaptedExperts(nn.Module):
    """Stands for Experts. An adapter acts before the activation too, so rows that have one are computed anew."""

    def __init__(self, base: Experts, name: str, adapters: Adapters) -> None:
        super().__init__()
        self.base, self._name, self._adapters = base, name, adapters

    @property
    def gate_up(self) -> Any:
        return self.base.gate_up

    @property
    def down(self) -> Any:
        return self.base.down

    @property
    def gate_up_bias(self) -> Tensor | None:
        return self.base.gate_up_bias

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        y = self.base(x, ids, weights, add)
        if self._adapters.enabled:
            program.call(self._replace, x, ids, weights, y, *(() if add is None else (add,)))
        return y

    def _replace(self, x: Tensor, ids: Tensor, weights: Tensor, y: Tensor, add: Tensor | None = None) -> None:
        for first, last, adapter in self._adapters.rows:
            matrices = self._adapters.matrices[adapter]
            if not any(name.startswith(f"{self._name}.") for name in matrices):
                continue
            for row in range(first, last):
                total = torch.zeros_like(y[row], dtype=torch.float32) if add is None else add[row].float()
                chosen: list[int] = ids[row].tolist()
                shares: list[float] = weights[row].tolist()
                for expert, share in zip(chosen, shares, strict=True):
                    total = total + share * self._expert(x[row : row + 1], expert, matrices)[0]
                y[row] = total.to(y.dtype)

    def _expert(self, x: Tensor, expert: int, matrices: Mapping[str, Matrices]) -> Tensor:
        base = self.base
        inner = expert_product(x, base.gate_up, base.gate_up_bias, expert).float()
        gate, up = (self._delta(x, expert, part, matrices, inner.shape[-1] // 2) for part in ("gate", "up"))
        hidden = activate(inner + torch.cat((gate, up), dim=-1), base.moe.activation, True, base.moe.clamp)
        out = expert_product(hidden.to(x.dtype), base.down, base.down_bias, expert).float()
        return out + self._delta(hidden, expert, "down", matrices, out.shape[-1])

    def _delta(self, x: Tensor, expert: int, part: str, matrices: Mapping[str, Matrices], width: int) -> Tensor:
        pair = matrices.get(f"{self._name}.{expert}.{part}")
        if pair is None:
            return x.new_zeros((x.shape[0], width), dtype=torch.float32)
        return (x.float() @ pair[0].t()) @ pair[1].t()


def _attach(decoder: nn.Module, adapters: Adapters, names: set[str]) -> set[str]:
    """Returns those of the names that can be adapted; replaces the layers that have some of them."""
    found: set[str] = set()
    for parent in list(decoder.modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(parent, AdaptedLinear | AdaptedExperts):
                continue
            linear = child.base if isinstance(child, AdaptedLinear) else child
            if isinstance(linear, Linear) and names & set(linear.names):
                found |= names & set(linear.names)
                if linear is child:
                    setattr(parent, child_name, AdaptedLinear(linear, _columns(linear, adapters.widths), adapters))
    for index, layer in enumerate(getattr(decoder, "layers", ())):
        found |= _attach_experts(layer.feed_forward, f"layers.{index}.ffn.experts", adapters, names)
    return found


def _attach_experts(feed_forward: Any, name: str, adapters: Adapters, names: set[str]) -> set[str]:
    own = {one for one in names if one.startswith(f"{name}.")}
    experts = getattr(feed_forward, "experts", None)
    if not own or not isinstance(experts, Experts | AdaptedExperts):
        return set()
    if isinstance(experts, Experts):
        if isinstance(experts.gate_up, TieredExperts):
            return set()
        feed_forward.experts = AdaptedExperts(experts, name, adapters)
    return own


def _columns(linear: Linear, widths: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Of each stacked matrix."""
    ends = list(accumulate(widths[name] for name in linear.names))
    return [(name, end - widths[name], end) for name, end in zip(linear.names, ends, strict=True)]
