"""The routed feed-forward: every row through the experts chosen for it."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core.model import Activation
from windlass.kernels.cpu import experts as native_experts
from windlass.kernels.ops import experts_training as experts_learning
from windlass.kernels.ops.activate import _reference as activate
from windlass.kernels.ops.linear import Matrix, packed_product, plain_product, stored
from windlass.kernels.program import program
from windlass.kernels.triton import available


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Matrix,
    down: Matrix,
    activation: Activation,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: float | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """x [rows, hidden]; ids and weights [rows, active], see `route`; the sum over a row's experts of weight * expert(x), plus `add`.

    Ids of no expert here (another rank's) add nothing.
    gate_up [experts, 2 * width, hidden] (gate first) and down [experts, hidden, width] are tensors, Panels or Rows of as many experts.
    """
    inputs = (x, ids, weights, gate_up, down, activation)
    how = {"gate_up_bias": gate_up_bias, "down_bias": down_bias, "clamp": clamp, "add": add}
    tensors = x, weights, stored(gate_up), stored(down), gate_up_bias, down_bias, add
    made = native_experts.experts(*inputs, **how) if program.usable(*tensors) else None
    if made is None and (gpu := available.kernels(*tensors)):
        made = gpu.experts(*inputs, **how)
    if made is None and gate_up_bias is None and down_bias is None and experts_learning.usable(x, gate_up, down):
        made = experts_learning.experts(*inputs, clamp=clamp, add=add)
    return _reference(*inputs, **how) if made is None else made


def _reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Matrix,
    down: Matrix,
    activation: Activation,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: float | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """Rows are sorted by expert, so that each expert sees its own once."""
    chosen = ids.flatten().long()
    num_experts = down.shape[0] if isinstance(down, Tensor) else down.num_experts
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < num_experts)]
    rows = order // ids.shape[1]
    said: list[Tensor] = [x[:0]]
    first = 0
    for expert, count in enumerate(chosen[order].bincount().tolist()):
        if not count:
            continue
        inner = _product(x[rows[first : first + count]], gate_up, gate_up_bias, expert)
        said.append(_product(activate(inner, activation, True, clamp), down, down_bias, expert))
        first += count
    weighed = torch.cat(said) * weights.flatten()[order, None]
    total = torch.zeros_like(x, dtype=weighed.dtype).index_add(0, rows, weighed).to(x.dtype)
    return total if add is None else total + add


def _product(x: Tensor, stacked: Matrix, biases: Tensor | None, expert: int) -> Tensor:
    bias = None if biases is None else biases[expert]
    return plain_product(x, stacked[expert], bias) if isinstance(stacked, Tensor) else packed_product(x, stacked, expert, bias)
