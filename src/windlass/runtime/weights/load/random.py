"""Random weights (core.ports.Weights): any shape without a checkpoint, with true sizes and dtypes. For benchmarks.

Matrices preserve the variance of their inputs, and those that write to the residual stream are divided by sqrt(2 * layers) (GPT-2,
section 2.3), so that activations stay finite at any depth. Norm weights are near one. Router rows are normalized, so that expert
load is about even.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod, sqrt

import torch
from torch import Tensor

from windlass.core.fused import TILE_ROWS
from windlass.core.model import ModelSpec
from windlass.core.place import Interval, Placement, stored
from windlass.core.rule import ModelPart, Role, Rule
from windlass.core.scheme import Scheme, Stored, scheme
from windlass.errors import BadInput, UnknownName
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.layout import random as random_tiles
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.packing.panels import BLOCK, Panels
from windlass.runtime.kernels.triton.available import has_packed_kernels
from windlass.runtime.weights.load.prefetch import trim_heap
from windlass.runtime.weights.load.tiled import is_gate_up
from windlass.runtime.weights.source import check_runnable
from windlass.runtime.weights.tensors.shards import RankShare
from windlass.runtime.weights.tensors.tensor_index import TensorIndex

POOL = 4_194_301
"""Size of the pool of random numbers that is repeated (drawing all would take minutes); a prime, so that rows start at different offsets."""

Matrix = Tensor | Panels | PackedRows | Tiles


class RandomWeights:
    """`quant` is a scheme or its name; what is quantized, and in which groups, is what conversion would do."""

    def __init__(
        self,
        spec: ModelSpec,
        rules: tuple[Rule, ...],
        *,
        quant: str | Scheme = "int4",
        group: int | None = None,
        seed: int = 0,
        placement: Placement | None = None,
        tp_index: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        tiled: bool = False,
    ) -> None:
        """`tiled`: use the layout of runtime/kernels/cuda, if it supports every matrix of the layers."""
        check_runnable(spec)
        self.spec, self.device = spec, torch.device(device)
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self.scheme = scheme(quant, group) if isinstance(quant, str) else quant
        self._index, self._seed = TensorIndex(rules), seed
        self._share = RankShare(placement=placement, tp_index=tp_index)
        self._embedding: Matrix | None = None
        self._pools: dict[torch.dtype, Tensor] = {}
        self._drawn: dict[str, Matrix] = {}
        """The layer of experts that is being given out one by one: gate and up, and down."""
        self.tiled = tiled and self._can_be_tiled()
        trim_heap()  # return the memory of a previous model

    # --- core.ports.Weights

    def matrix(self, *names: str) -> Matrix:
        if self.spec.tied_head and names in (("embed.weight",), ("head.weight",)):
            if self._embedding is None:
                self._embedding = self._made([self._index.get("embed.weight").rule], "embed.weight")
            return self._embedding
        return self._made([self._index.get(name).rule for name in names], " ".join(names))

    def dense_matrix(self, *names: str) -> Tensor:
        rules = [self._index.get(name).rule for name in names]
        return self._dense(self._shape(rules), self._spread(rules[0]), " ".join(names))

    def vector(self, *names: str) -> Tensor | None:
        found = [self._index.find(name) for name in names]
        rules = [ours.rule for ours in found if ours is not None]
        if not rules:
            return None
        if len(rules) < len(names):
            raise UnknownName("tensor", names[found.index(None)], [ours.name for ours in found if ours is not None])
        return torch.cat([self._numbers(rule, name, ()) for rule, name in zip(rules, names, strict=True)])

    def experts(self, layer: int, *parts: str, only: Interval | None = None) -> Matrix:
        """`only`: some of this rank's experts, first..last; they are the same as among all."""
        rules = self._expert_rules(layer, parts, "weight")
        start, stop = self._share.experts(rules[0].num_experts)
        name = f"layers.{layer}.experts {' '.join(parts)}"
        if only is None:
            return self._made(rules, name, stop - start)
        return self._some_experts(rules, name, stop - start, only)

    def expert_vectors(self, layer: int, *parts: str) -> Tensor | None:
        if self._index.expert_rule(layer, parts[0], "bias") is None:
            return None
        rules = self._expert_rules(layer, parts, "bias")
        start, stop = self._share.experts(rules[0].num_experts)
        made = [self._numbers(rule, f"layers.{layer}.experts.{rule.ours}", (stop - start,)) for rule in rules]
        return torch.cat(made, dim=-1)

    # --- for weights that live elsewhere (offload)

    def num_experts(self) -> int:
        """Of each layer, on this rank."""
        first, last = self._share.experts(self.spec.experts.num_experts) if self.spec.experts else (0, 0)
        return last - first

    def skip(self, *names: str) -> None:
        """Nothing to count: drawing reports no progress."""

    def skip_experts(self, layer: int, count: int) -> None:
        """Nothing to count."""

    def _some_experts(self, rules: list[Rule], name: str, num_experts: int, only: Interval) -> Matrix:
        if name not in self._drawn:
            self._drawn = {key: made for key, made in self._drawn.items() if key.split()[0] == name.split()[0]}
            self._drawn[name] = self._made(rules, name, num_experts)
        first, last = only
        every = self._drawn[name]
        if isinstance(every, Panels):
            part = every.data[first * every.expert_bytes : last * every.expert_bytes]
            return replace(every, data=part, num_experts=last - first)
        if isinstance(every, Tiles):
            return every.part(first, last)
        assert isinstance(every, Tensor), "experts are panels, tiles or plain"
        return every[first:last]

    # --- drawing

    def _expert_rules(self, layer: int, parts: Sequence[str], kind: str) -> list[Rule]:
        rules = [self._index.expert_rule(layer, part, kind) for part in parts]
        found = [rule for rule in rules if rule is not None]
        if len(found) < len(parts):
            raise UnknownName("expert tensor", f"layers.{layer} {' '.join(parts)} {kind}", ["gate", "up", "down"])
        return found

    def _made(self, rules: list[Rule], name: str, num_experts: int = 0) -> Matrix:
        how, shape, spread = stored(rules[0], self.scheme), self._shape(rules), self._spread(rules[0])
        if self.tiled and how.bits == 4 and rules[0].layers is not None:
            assert how.group is not None
            paired = is_gate_up([rule.ours for rule in rules])
            return random_tiles(
                max(num_experts, 1), *shape, how.group, spread, paired=paired, device=self.device, seed=self._seed_of(name)
            )
        if how.bits >= 16 or not has_packed_kernels(self.device) or not _has_panels(how, shape[1]):
            made = self._dense((num_experts, *shape) if num_experts else shape, spread, name, wide=how.bits > 16)
            return torch.nn.functional.normalize(made, dim=-1) if rules[0].ours.endswith(".router.weight") else made
        kind, scale_dtype = _panels(how, self.scheme)
        form = (kind, *shape, how.group or shape[1], num_experts, scale_dtype)
        if self.device.type == "cpu":
            return Panels.random(*form, deviation=spread, seed=self._seed_of(name))
        return PackedRows.random(*form, self.device, deviation=spread, seed=self._seed_of(name))

    def _can_be_tiled(self) -> bool:
        """Every matrix of the layers but the routers."""
        if self.scheme.name != "int4" or self.scheme.zero_points:
            return False
        layers = [
            rule for rule in self._index.rules if rule.layers is not None and len(rule.shape) == 2 and rule.part is ModelPart.MAIN
        ]
        return all(
            stored(rule, self.scheme).bits == 4 and rule.shape[0] % TILE_ROWS == 0
            for rule in layers
            if not rule.ours.endswith(".router.weight")
        )

    def _shape(self, rules: list[Rule]) -> tuple[int, int]:
        """This rank's shape of the concatenated matrices."""
        held = [self._share.slices(rule) for rule in rules]
        return sum(stop - start for (start, stop), _ in held), held[0][1][1] - held[0][1][0]

    def _spread(self, rule: Rule) -> float:
        """Standard deviation, from all inputs including those of other ranks."""
        if rule.role is Role.LOOKUP and not self.spec.tied_head:
            return 1.0
        last = rule.ours.endswith((".o.weight", ".down.weight"))
        return 1 / sqrt(rule.shape[1] * (2 * self.spec.num_layers if last else 1))

    def _dense(self, shape: tuple[int, ...], spread: float, name: str, *, wide: bool = False) -> Tensor:
        dtype = torch.float32 if wide else torch.bfloat16
        if self.device.type == "cuda":
            source = torch.Generator(self.device).manual_seed(self._seed_of(name))
            return torch.randn(shape, dtype=self.dtype, device=self.device, generator=source).mul_(spread)
        pool = self._pools.get(dtype)
        if pool is None:
            drawn = torch.randn(POOL, generator=torch.Generator().manual_seed(self._seed))
            pool = self._pools[dtype] = drawn.to(dtype)
        made = torch.empty(prod(shape), dtype=dtype)
        offset = self._seed_of(name) % POOL
        start = 0
        while start < len(made):
            count = min(POOL - offset, len(made) - start)
            torch.mul(pool[offset : offset + count], spread, out=made[start : start + count])
            start, offset = start + count, 0
        return made.view(shape).to(self.device, dtype if self.device.type == "cpu" else self.dtype)

    def _numbers(self, rule: Rule, name: str, before: tuple[int, ...]) -> Tensor:
        """A vector: norms near one, everything else near zero."""
        ((start, stop),) = self._share.slices(rule)
        drawn = torch.randn(*before, rule.shape[0], generator=torch.Generator().manual_seed(self._seed_of(name)))[..., start:stop]
        if rule.ours.endswith(".router.correction"):
            return torch.zeros_like(drawn).to(self.device)  # otherwise some experts would be chosen by every token
        is_norm = rule.ours.endswith("norm.weight")
        return (1 + 0.05 * drawn if is_norm else 0.02 * drawn).to(self.device)

    def _seed_of(self, name: str) -> int:
        return zlib.crc32(f"{self._seed} {name}".encode())


def _has_panels(how: Stored, num_in: int) -> bool:
    group = how.group or BLOCK
    return group % BLOCK == 0 and num_in % group == 0


def _panels(how: Stored, chosen: Scheme) -> tuple[str, torch.dtype]:
    """Kind and scale dtype. MXFP4 is held as int8, as when loaded from a checkpoint (tensors.storage_format)."""
    if chosen.name == "mxfp4":
        return "int8", torch.bfloat16
    if chosen.name == "fp8":
        return "fp8", torch.float32
    if chosen.name not in ("int4", "int8"):
        raise BadInput(f"random weights are not available in {chosen.name}; choose int4, int8, fp8, mxfp4, bf16 or fp32")
    return ("int4_zeros" if how.zero_points else f"int{how.bits}"), torch.bfloat16
