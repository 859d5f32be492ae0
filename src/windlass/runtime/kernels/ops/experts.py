"""The routed feed-forward: every row through the experts chosen for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.runtime.kernels.arguments import ExpertsArgs
from windlass.runtime.kernels.cpu import experts as native_experts
from windlass.runtime.kernels.ops import experts_training
from windlass.runtime.kernels.ops.activate import reference as activate
from windlass.runtime.kernels.ops.linear import packed_product, plain_product
from windlass.runtime.kernels.packing.matrix import WeightMatrix, num_experts, weight_data
from windlass.runtime.kernels.packing.tiered import TieredExperts
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.triton import available


def experts(args: ExpertsArgs) -> Tensor:
    """[rows, hidden]: the sum over a row's experts of weight * expert(x), plus `add`."""
    if isinstance(args.gate_up, TieredExperts) or isinstance(args.down, TieredExperts):
        return _tiered(args, args.gate_up)
    biases = args.gate_up_bias, args.down_bias
    tensors = args.x, args.weights, weight_data(args.gate_up), weight_data(args.down), *biases, args.add
    result = native_experts.experts(args) if program.usable(*tensors) else None
    if result is None and (gpu := available.kernels(*tensors)):
        result = gpu.experts(args)
    if result is None and biases == (None, None) and experts_training.usable(args.x, args.gate_up, args.down):
        result = experts_training.experts(args)
    return reference(args) if result is None else result


def _tiered(args: ExpertsArgs, source: Any) -> Tensor:
    """A replay returns to Python, which knows where the chosen experts are. The call keeps no tensor of the step, so that its memory is
    reused."""
    result = program.empty_on(args.x.shape, args.x.dtype, args.x.device)
    rest = (args.activation, args.gate_up_bias, args.down_bias, args.clamp)
    guessed = None if source.guess is None else source.guess(args.x)
    optional = [tensor for tensor in (args.add, guessed) if tensor is not None]
    has_add, has_guess = args.add is not None, guessed is not None

    def compute(x: Tensor, ids: Tensor, weights: Tensor, result: Tensor, *more: Tensor) -> None:
        add = more[0] if has_add else None
        source.compute(ExpertsArgs(x, ids, weights, source, source, *rest, add), result, more[-1] if has_guess else None)

    program.call(compute, args.x, args.ids, args.weights, result, *optional)
    return result


def reference(args: ExpertsArgs) -> Tensor:
    """Rows are sorted by expert, so that each expert's weights are used once."""
    chosen = args.ids.flatten().long()
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < num_experts(args.down))]
    rows = order // args.ids.shape[1]
    outputs: list[Tensor] = [args.x[:0]]
    first = 0
    for expert, count in enumerate(chosen[order].bincount().tolist()):
        if not count:
            continue
        inner = expert_product(args.x[rows[first : first + count]], args.gate_up, args.gate_up_bias, expert)
        outputs.append(expert_product(activate(inner, args.activation, True, args.clamp), args.down, args.down_bias, expert))
        first += count
    weighted = torch.cat(outputs) * args.weights.flatten()[order, None]
    total = torch.zeros_like(args.x, dtype=weighted.dtype).index_add(0, rows, weighted).to(args.x.dtype)
    return total if args.add is None else total + args.add


def expert_product(x: Tensor, stacked: WeightMatrix, biases: Tensor | None, expert: int) -> Tensor:
    bias = None if biases is None else biases[expert]
    return plain_product(x, stacked[expert], bias) if isinstance(stacked, Tensor) else packed_product(x, stacked, expert, bias)
