"""Initial weights of a model to train (core.ports.Weights): random, or from a checkpoint. Only this rank's slices.

Random values depend only on the seed and the tensor's name, so a model starts the same however it is split. The layout of every tensor
handed out is kept, so that checkpoints and gradients find our tensors in the parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from windlass.core.model import ModelSpec
from windlass.core.rule import Role, Rule
from windlass.errors import UnknownName
from windlass.runtime.weights.load.dense import load_dense, load_vector
from windlass.runtime.weights.source import OpenedModel, check_runnable
from windlass.runtime.weights.tensors.readers import ModelTensor
from windlass.runtime.weights.tensors.shards import RankShare, shard_of
from windlass.runtime.weights.tensors.tensor_index import TensorIndex
from windlass.tasks.train.params.layout import ParameterLayout, TensorSlice

DEVIATION = 0.02
"""Standard deviation of matrices; output projections are divided by sqrt(2 * layers) (GPT-2, section 2.3)."""


class InitialWeights:
    """Random: matrices normal, norms one, everything else zero."""

    tiled = False

    def __init__(
        self,
        spec: ModelSpec,
        rules: tuple[Rule, ...],
        *,
        seed: int = 0,
        share: RankShare | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        held_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype`: of activations; `held_dtype`: of the trained weights."""
        check_runnable(spec)
        self.spec, self.device, self.dtype, self.held_dtype = spec, torch.device(device), dtype, held_dtype
        self._named, self._seed, self._share = TensorIndex(rules), seed, share or RankShare()
        self._embedding: Tensor | None = None
        self.layouts: dict[int, ParameterLayout] = {}
        """By the address of the tensor handed out."""

    # --- core.ports.Weights

    def matrix(self, *names: str) -> Tensor:
        if self.spec.tied_head and names in (("embed.weight",), ("head.weight",)):
            if self._embedding is None:
                self._embedding = self._stacked([self._named.get("embed.weight")])
            return self._embedding
        return self._stacked([self._named.get(name) for name in names])

    def dense_matrix(self, *names: str) -> Tensor:
        return self.matrix(*names)

    def vector(self, *names: str) -> Tensor | None:
        found = [self._named.find(name) for name in names]
        if not any(found):
            return None
        if None in found:
            raise UnknownName("tensor", names[found.index(None)], [ours.name for ours in found if ours is not None])
        return self._stacked([ours for ours in found if ours is not None])

    def experts(self, layer: int, *parts: str) -> Tensor:
        return self._expert_stack(layer, parts, "weight")

    def expert_vectors(self, layer: int, *parts: str) -> Tensor | None:
        if self._named.expert_rule(layer, parts[0], "bias") is None:
            return None
        return self._expert_stack(layer, parts, "bias")

    # --- making tensors

    def _stacked(self, wanted: Sequence[ModelTensor]) -> Tensor:
        made = torch.cat([self._values(ours) for ours in wanted])
        parts = tuple(TensorSlice(ours.name, ours.shape, self._share.slices(ours.rule)) for ours in wanted)
        learns = not wanted[0].name.endswith(".router.correction")
        return self._given(made, ParameterLayout(parts, 0), learns)

    def _expert_stack(self, layer: int, parts: Sequence[str], kind: str) -> Tensor:
        found = [self._named.expert_rule(layer, part, kind) for part in parts]
        rules = [rule for rule in found if rule is not None]
        if len(rules) < len(parts):
            raise UnknownName("expert tensor", f"layers.{layer} {' '.join(parts)} {kind}", ["gate", "up", "down"])
        experts = self._share.experts(rules[0].num_experts)
        made = [
            torch.cat([self._values(ModelTensor(rule=rule, layer=layer, expert=expert)) for rule in rules])
            for expert in range(*experts)
        ]
        held = tuple(
            TensorSlice(
                rule.ours.format(layer=layer, expert="*").replace(".*.", "."),
                (rule.num_experts, *rule.shape),
                (experts, *self._share.slices(rule)),
            )
            for rule in rules
        )
        return self._given(torch.stack(made), ParameterLayout(held, 1), True)

    def _given(self, made: Tensor, layout: ParameterLayout, learns: bool) -> Tensor:
        made = made.contiguous().requires_grad_(learns)
        self.layouts[made.data_ptr()] = layout
        return made

    def _values(self, ours: ModelTensor) -> Tensor:
        """This rank's slice of one of our tensors."""
        held = tuple(slice(*interval) for interval in self._share.slices(ours.rule))
        return self._drawn(ours)[held].to(self.held_dtype)

    def _drawn(self, ours: ModelTensor) -> Tensor:
        if ours.rule.role is Role.VECTOR:
            is_norm = ours.rule.ours.endswith("norm.weight")
            return torch.full(ours.shape, 1.0 if is_norm else 0.0, device=self.device)
        source = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self._seed} {ours.name}".encode()))
        last = ours.rule.ours.endswith((".o.weight", ".down.weight"))
        deviation = DEVIATION / (sqrt(2 * self.spec.num_layers) if last else 1.0)
        return torch.randn(ours.shape, device=self.device, generator=source).mul_(deviation)


class LoadedWeights(InitialWeights):
    """From a checkpoint of any supported format. What it lacks (an MTP layer) is random."""

    def __init__(self, opened: OpenedModel, **options: Any) -> None:
        super().__init__(opened.spec, opened.rules, **options)
        self._opened = opened

    def _values(self, ours: ModelTensor) -> Tensor:
        place = self._opened.locations.get(ours.name)
        if place is None:
            return super()._values(ours)
        part = shard_of(ours, place, self._share.slices(ours.rule))
        if len(ours.shape) == 1:
            return load_vector(self._opened.store, [part], self.held_dtype, self.device)
        return load_dense(self._opened.store, [[part]], self.held_dtype, self.device)[0]
