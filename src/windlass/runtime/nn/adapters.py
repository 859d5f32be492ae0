"""LoRA adapters while serving: each row of a step is computed with its own, or with none (arXiv 2106.09685; mixed batches as in S-LoRA,
arXiv 2311.03285).

A matrix product of the base model runs for all rows as before; then b (a x) is added to the rows that have an adapter. Other rows keep
their bits. Steps without adapters do not come here at all: `enabled` is off while their program is recorded or run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.errors import BadInput
from windlass.runtime.kernels.ops.activate import reference as activate
from windlass.runtime.kernels.ops.linear import linear
from windlass.runtime.kernels.packing.matrix import WeightMatrix, num_experts, one_expert
from windlass.runtime.kernels.packing.tiered import TieredExperts
from windlass.runtime.kernels.program import program
from windlass.runtime.nn.linear import Linear
from windlass.runtime.nn.moe import Experts

Matrices = tuple[Tensor, Tensor]
"""a [rank, in] and b [out, rank], the scale included."""
ExpertMatrices = Mapping[str, Matrices]
"""Of one expert: `gate`, `up` and `down`, those that are changed."""
FEW_ROWS = 16
RowRange = tuple[int, int, str]
"""Rows first..last of a step, and their adapter."""


def row_ranges(starts: Sequence[int], adapters: Sequence[str]) -> list[RowRange]:
    """`starts`: of each sequence's rows, and their end. Sequences one after another with the same adapter are one range."""
    found: list[RowRange] = []
    for first, last, adapter in zip(starts, starts[1:], adapters, strict=False):
        if found and found[-1][1:] == (first, adapter):
            found[-1] = (found[-1][0], last, adapter)
        elif adapter:
            found.append((first, last, adapter))
    return found


class Adapters:
    """All adapters of a decoder, and which rows of the current step have which."""

    def __init__(self, widths: Mapping[str, int], device: str) -> None:
        """`widths`: rows of every matrix of the model, by our name."""
        self.widths = widths
        self.matrices: dict[str, dict[str, Matrices]] = {}
        """Adapter -> our name of a matrix -> what is added to it."""
        self._experts: dict[str, dict[str, dict[int, dict[str, Matrices]]]] = {}
        """Adapter -> our name of a layer's experts -> expert -> what is added to it."""
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
        self._experts[name] = _by_expert(self.matrices[name])

    def remove(self, name: str) -> None:
        """Its layers stay, and add nothing. No request may have it."""
        self.matrices.pop(name, None)
        self._experts.pop(name, None)

    def of_rows(self, name: str) -> list[tuple[int, int, Matrices]]:
        """The rows of the step whose adapter changes this matrix."""
        found = [(first, last, self.matrices[adapter].get(name)) for first, last, adapter in self.rows]
        return [(first, last, pair) for first, last, pair in found if pair is not None]

    def expert_rows(self, name: str) -> list[tuple[list[tuple[int, int]], Mapping[int, ExpertMatrices]]]:
        """Of each adapter that changes these experts: its rows of the step, and its matrices by expert."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for first, last, adapter in self.rows:
            if name in self._experts[adapter]:
                ranges.setdefault(adapter, []).append((first, last))
        return [(of_adapter, self._experts[adapter][name]) for adapter, of_adapter in ranges.items()]


def _by_expert(matrices: Mapping[str, Matrices]) -> dict[str, dict[int, dict[str, Matrices]]]:
    """`layers.3.ffn.experts.7.gate` -> [`layers.3.ffn.experts`][7][`gate`]."""
    found: dict[str, dict[int, dict[str, Matrices]]] = {}
    for name, pair in matrices.items():
        stem, _, rest = name.partition(".experts.")
        if rest:
            expert, _, part = rest.partition(".")
            found.setdefault(f"{stem}.experts", {}).setdefault(int(expert), {})[part] = pair
    return found


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
                _add(y[first:last, start:stop], x[first:last], a, b)


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
        """Pairs of a row and its expert are sorted by expert and adapter, so that each expert's weights are used once."""
        adapted = self._adapters.expert_rows(self._name)
        if not adapted:
            return
        number, num_active = len(adapted), ids.shape[1]
        rows, owners = _rows_and_owners([ranges for ranges, _ in adapted], x.device)
        pairs = (ids[rows].long() * number + owners[:, None]).flatten()
        order = pairs.argsort(stable=True)
        counts: list[list[int]] = (
            pairs.bincount(minlength=number * num_experts(self.base.down)).unflatten(0, (-1, number)).tolist()
        )
        inputs = x[rows[order // num_active]]
        outputs = torch.empty((len(pairs), y.shape[1]), dtype=torch.float32, device=y.device)
        first = 0
        for expert, of_adapters in enumerate(counts):
            count = sum(of_adapters)
            if count:
                changes = [matrices.get(expert, {}) for _, matrices in adapted]
                own = inputs[first : first + count]
                outputs[order[first : first + count]] = self._expert(own, expert, list(zip(of_adapters, changes, strict=True)))
                first += count
        total = (outputs.unflatten(0, (-1, num_active)) * weights[rows].float().unsqueeze(-1)).sum(1)
        y[rows] = (total if add is None else total + add[rows].float()).to(y.dtype)

    def _expert(self, x: Tensor, expert: int, changes: list[tuple[int, ExpertMatrices]]) -> Tensor:
        """`changes`: for so many rows, one after another, an adapter's matrices of this expert."""
        base = self.base
        inner = _product(x, base.gate_up, base.gate_up_bias, expert)
        half = inner.shape[1] // 2
        _add_changes(inner[:, :half], x, "gate", changes)
        _add_changes(inner[:, half:], x, "up", changes)
        hidden = activate(inner, base.moe.activation, True, base.moe.clamp)
        out = _product(hidden.to(x.dtype), base.down, base.down_bias, expert)
        _add_changes(out, hidden, "down", changes)
        return out


def _add(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
    """y += b (a x) in fp32. Of few rows that is so little that waking the kernels' threads would take longer; PyTorch's sums depend on how many
    they are."""
    product = linear if x.shape[0] > FEW_ROWS or program.is_invariant() else functional.linear
    y += product(product(x.float(), a), b).to(y.dtype)


def _product(x: Tensor, stacked: WeightMatrix, biases: Tensor | None, expert: int) -> Tensor:
    return linear(x, one_expert(stacked, expert), None if biases is None else biases[expert]).float()


def _add_changes(y: Tensor, x: Tensor, part: str, changes: list[tuple[int, ExpertMatrices]]) -> None:
    first = 0
    for count, matrices in changes:
        pair = matrices.get(part)
        if count and pair is not None:
            _add(y[first : first + count], x[first : first + count], *pair)
        first += count


def _rows_and_owners(adapted: list[list[tuple[int, int]]], device: torch.device) -> tuple[Tensor, Tensor]:
    """All rows of these ranges, and the number of the list that each one is from."""
    rows = [row for ranges in adapted for first, last in ranges for row in range(first, last)]
    counts = [sum(last - first for first, last in ranges) for ranges in adapted]
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    return torch.tensor(rows, device=device), torch.tensor(owners, device=device)


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
