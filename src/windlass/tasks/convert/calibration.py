"""Calibration: second moments (Hessians) of every matrix's inputs, measured on sample tokens layer by layer.

The samples run through the unquantized model, one layer in memory at a time, just before that layer is quantized;
`kernels.packing.calibrated` rounds with the moments. Memory: one layer in the source's dtype, the hidden states of the samples, and
the moments of layers in progress: width squared in fp32 per distinct input. The experts of a layer share the moments of their
input; each down projection has its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from windlass.core import model
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.ops.activate import activate
from windlass.runtime.kernels.ops.linear import StackedMatrix, WeightMatrix, embed, linear
from windlass.runtime.kernels.ops.norm import add
from windlass.runtime.kernels.ops.route import route
from windlass.runtime.kernels.packing.calibrated import CalibrationInputs, inputs_from
from windlass.runtime.kernels.step import Step
from windlass.runtime.nn.layer import DecoderLayer
from windlass.runtime.nn.mixers.positions import Rotary
from windlass.runtime.nn.moe import MixtureOfExperts
from windlass.runtime.nn.norm import NormLayer
from windlass.runtime.weights import CheckpointWeights, OpenedModel
from windlass.runtime.weights.source import check_runnable
from windlass.runtime.weights.tensors.validate import locate_tensors
from windlass.tasks.convert.outputs import ConvertedTensor

ROWS_AT_A_TIME = 4096
"""Sample tokens per forward pass of a layer."""

# Suffix of our tensor name -> modules of nn.Layer whose input the matrix multiplies.
MODULES = {
    "mixer.q": ("mixer.qkv", "mixer.q"),
    "mixer.k": ("mixer.qkv",),
    "mixer.v": ("mixer.qkv",),
    "mixer.o": ("mixer.o",),
    "mixer.q_a": ("mixer.q.0",),
    "mixer.q_b": ("mixer.q.2",),
    "mixer.kv_a": ("mixer.kv",),
    "ffn.gate": ("feed_forward.up",),
    "ffn.up": ("feed_forward.up",),
    "ffn.down": ("feed_forward.down",),
    "ffn.shared.gate": ("feed_forward.shared.up",),
    "ffn.shared.up": ("feed_forward.shared.up",),
    "ffn.shared.down": ("feed_forward.shared.down",),
}
EXPERT_INPUT = "experts"

PreHook = Callable[[nn.Module, tuple[Any, ...]], None]


class Calibration:
    """Workers request `inputs` in roughly layer order; the forward pass advances when a later layer is requested. Thread-safe."""

    def __init__(self, opened: OpenedModel, samples: Tensor) -> None:
        """`samples`: int tokens [sequences, length]."""
        check_runnable(opened.spec)
        self.spec, self.samples = opened.spec, samples
        self._weights = CheckpointWeights(msgspec.structs.replace(opened, locations=locate_tensors(opened.rules, opened.store)))
        self._rotary = (
            Rotary(self.spec.positions, samples.shape[1], self._weights) if isinstance(self.spec.positions, model.Rope) else None
        )
        self._lock = threading.Lock()
        self._next = 0
        self._hidden: Tensor | None = None
        self._left: Counter[int] = Counter()
        self._moments: dict[tuple[int, str], Tensor] = {}
        self._inputs: dict[tuple[int, str], CalibrationInputs] = {}

    def expect(self, outputs: Iterable[ConvertedTensor]) -> None:
        """Announces the output of every slice still to do; layers without any are run but not measured."""
        self._left.update(output.layer for output in outputs if output.layer is not None)

    def inputs(self, output: ConvertedTensor) -> CalibrationInputs | None:
        """Moments for quantizing this output; None where none were measured."""
        if output.layer is None or output.layer >= self.spec.num_layers or not output.packed:
            return None
        with self._lock:
            while self._next <= output.layer:
                self._advance()
            key = (output.layer, self._point(output))
            if key not in self._inputs and key in self._moments:
                self._inputs[key] = inputs_from(self._moments.pop(key))
            return self._inputs.get(key)

    def done(self, output: ConvertedTensor) -> None:
        """One slice is done; a layer's moments are freed after its last."""
        if output.layer is None:
            return
        with self._lock:
            self._left[output.layer] -= 1
            if self._left[output.layer] <= 0:
                for kept in (self._moments, self._inputs):
                    for key in [key for key in kept if key[0] == output.layer]:
                        del kept[key]

    # --- the forward pass

    @torch.no_grad()
    def _advance(self) -> None:
        index = self._next
        if self._hidden is None:
            self._hidden = self._embedded()
        layer = DecoderLayer(self.spec, index, self._weights, self._rotary)
        hooks = self._watch(layer, index) if self._left[index] > 0 else []
        length = self.samples.shape[1]
        per_pass = max(ROWS_AT_A_TIME // length, 1)
        passed = [
            layer(rows, _whole_sequences(rows.shape[0] // length, length), None)
            for rows in torch.split(self._hidden, per_pass * length)
        ]
        for hook in hooks:
            hook.remove()
        self._hidden = torch.cat(passed)
        self._next += 1

    def _embedded(self) -> Tensor:
        tokens = self.samples.flatten().int()
        x = embed(tokens, self._table("embed.weight"))
        if isinstance(self.spec.positions, model.LearnedPositions):
            positions = torch.arange(self.samples.shape[1], dtype=torch.int32).repeat(self.samples.shape[0])
            x = add(x, embed(positions, self._table("positions.weight")))
        return NormLayer(self.spec.norm, self._weights, "embed_norm")(x) if self.spec.embedding_norm else x

    def _table(self, name: str) -> WeightMatrix:
        found = self._weights.matrix(name)
        assert not isinstance(found, Tiles | StackedMatrix), "those are for matrices of layers"
        return found

    # --- moments

    def _watch(self, layer: DecoderLayer, index: int) -> list[RemovableHandle]:
        paths = {path for paths in MODULES.values() for path in paths}
        modules = cast(Iterable[tuple[str, nn.Module]], layer.named_modules())
        watched = [(path, module) for path, module in modules if path in paths and not isinstance(module, nn.Sequential)]
        hooks = [module.register_forward_pre_hook(self._hook(index, path)) for path, module in watched]
        if isinstance(layer.feed_forward, MixtureOfExperts):
            hooks.append(layer.feed_forward.register_forward_pre_hook(self._expert_hook(index, layer.feed_forward)))
        return hooks

    def _hook(self, index: int, path: str) -> PreHook:
        return lambda module, args: self._add(index, path, args[0])

    def _expert_hook(self, index: int, moe: MixtureOfExperts) -> PreHook:
        return lambda module, args: self._add_experts(index, moe, args[0])

    def _add(self, index: int, point: str, rows: Tensor) -> None:
        rows = rows.float()
        key = (index, point)
        self._moments[key] = self._moments[key].addmm_(rows.T, rows) if key in self._moments else rows.T @ rows

    def _add_experts(self, index: int, moe: MixtureOfExperts, rows: Tensor) -> None:
        self._add(index, EXPERT_INPUT, rows)
        ids, _ = route(moe.router(rows), moe.correction, moe.moe.router, moe.moe.num_active)
        for expert in map(int, torch.bincount(ids.flatten().long()).nonzero().flatten()):
            chosen = rows[torch.any(ids == expert, dim=1)]
            bias = None if moe.gate_up_bias is None else moe.gate_up_bias[expert]
            matrix = moe.gate_up[expert] if isinstance(moe.gate_up, Tensor) else moe.gate_up.dense(expert)
            inner = activate(linear(chosen, matrix, bias), moe.moe.activation, True, moe.moe.clamp)
            self._add(index, f"{EXPERT_INPUT}.{expert}", inner)

    def _point(self, output: ConvertedTensor) -> str:
        """Key of the layer input that this output's matrix multiplies."""
        ours = output.rule.ours.removesuffix(".weight").partition("layers.{layer}.")[2]
        if output.expert is not None:
            return f"{EXPERT_INPUT}.{output.expert}" if ours.endswith("down") else EXPERT_INPUT
        paths = MODULES.get(ours, ())
        known = [path for path in paths if (output.layer, path) in self._moments or (output.layer, path) in self._inputs]
        return known[0] if known else ""


def _whole_sequences(count: int, length: int) -> Step:
    rows = count * length
    positions = torch.arange(length, dtype=torch.int32).repeat(count)
    nothing = torch.zeros(0, dtype=torch.int32)
    return Step(
        tokens=nothing,
        positions=positions,
        slots=nothing,
        starts=torch.arange(0, rows + 1, length, dtype=torch.int32),
        lengths=torch.full((count,), length, dtype=torch.int32),
        blocks=nothing,
        logit_rows=nothing,
        counts=torch.tensor([rows, count, 0], dtype=torch.int32),
    )
