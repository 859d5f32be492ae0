"""A rank of a training run's grid, as the trainer sees it: its share of the model and of the samples, and every sum over ranks.

Losses are means over the whole step, so gradients of ranks with other samples add up: nothing is ever divided by a number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.place import Placement, cut, place
from windlass.core.recipe.recipe import Parallel
from windlass.core.rule import AxisName, Rule
from windlass.core.scheme import scheme
from windlass.errors import Impossible
from windlass.nn.moe import MixtureOfExperts
from windlass.nn.parallel.shard import Shard
from windlass.parallel.autograd import LearningGroup
from windlass.parallel.groups import Groups
from windlass.train.model.model import Micro, Trained
from windlass.train.model.packing import IGNORED
from windlass.train.parallel.dispatch import Dispatched
from windlass.train.parallel.meshes import Meshes, degrees
from windlass.train.parallel.stages import Pipeline, Staged
from windlass.train.params.layout import Part, Slab
from windlass.train.step import Sums, run_in_turn
from windlass.weights.tensors.shards import RankShare

BUCKET_ELEMENTS = 2**26


@dataclass(frozen=True)
class Place:
    """Where a rank stands among others, for a Shard that only asks."""

    rank: int
    size: int
    is_native: bool = False


class Ranks:
    """`windlass.train.step.Alone`, over many."""

    def __init__(self, parallel: Parallel, spec: ModelSpec, rules: tuple[Rule, ...], device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.of = degrees(parallel, self.world)
        self.spec, self.device = spec, device
        _check(spec, self.of.pp)
        self.meshes = Meshes(device.type, self.of)
        self.dp_rank, self.dp_size = self.meshes.dp_rank, self.of.dp
        self.owns_losses = self.meshes.tp_rank == 0
        self.placement = place(rules, spec.num_layers, Layout(tp=self.of.tp, pp=self.of.pp), scheme("bf16"))
        self.shard, self.share_of_weights = self._shard(), self._share_of_weights()
        self._slabs: Mapping[str, Slab] = {}
        self._alike: set[str] = set()
        """Our tensors of which every slice has all."""
        self._pipeline: Pipeline | None = None

    # --- what is here

    def _shard(self) -> Shard:
        tp: Any = LearningGroup(self.meshes.group("tp"))
        groups = Groups(tp, Place(self.meshes.pp_rank, self.of.pp))  # type: ignore[arg-type]
        return Shard(self.placement, Layout(tp=self.of.tp, pp=self.of.pp), groups)

    def _share_of_weights(self) -> RankShare:
        placement = self.placement
        if placement.experts and self.of.ep > 1:
            (whole,) = placement.experts
            placement = msgspec.structs.replace(placement, experts=cut(whole[1], 1, [1.0] * self.of.ep))
            return RankShare(placement=placement, tp_index=self.meshes.tp_rank, ep_index=self.meshes.ep_rank)
        return RankShare(placement=placement, tp_index=self.meshes.tp_rank)

    def expert_intervals(self) -> Placement:
        placement = self.share_of_weights.placement
        assert placement is not None
        return placement

    def dispatch_experts(self, model: Trained) -> None:
        """Before slabs are named: experts get a module of their own around them."""
        if self.of.ep == 1:
            return
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                module.experts = Dispatched(module.experts, self.expert_intervals().experts, self.meshes.group("ep"))  # type: ignore[arg-type]

    def arrange(self, model: Trained, slabs: Mapping[str, Slab], compute: torch.dtype) -> bool:
        """FSDP over the model, stages around it. Whether FSDP computes in `compute` by itself, so that no masters are needed."""
        self._slabs = slabs
        self._alike = {part.name for slab in slabs.values() for part in slab.parts if _is_whole(part)}
        if self.of.tp > 1:
            model.head_loss = self._head_loss(model)
        root: nn.Module = model
        if self.of.pp > 1:
            root = Staged(model)
            self._pipeline = Pipeline(root, self.meshes.group("pp"), self.device)
        if self.meshes.dense_mesh is None:
            return False
        self._shard_all(model, root, compute)
        return True

    def _head_loss(self, model: Trained) -> Any:
        vocabulary: Any = model.decoder.vocabulary
        return lambda hidden, head, targets, z: vocabulary.loss(hidden, head, targets, z, IGNORED)

    def _shard_all(self, model: Trained, root: nn.Module, compute: torch.dtype) -> None:
        """From within outwards: experts over the ranks that have the same ones, routers in full precision, layers, and what is left."""
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=_reduced(compute), cast_forward_inputs=False)
        exact = MixedPrecisionPolicy(reduce_dtype=_reduced(compute), cast_forward_inputs=False)
        dense, experts = self.meshes.dense_mesh, self.meshes.expert_mesh
        layers = [*model.decoder.layers, *([model.next_token.layer] if model.next_token is not None else [])]
        for layer in layers:
            feed = layer.feed_forward
            if isinstance(feed, MixtureOfExperts):
                fully_shard(getattr(feed.experts, "inner", feed.experts), mesh=experts, mp_policy=policy)
                fully_shard(feed.router, mesh=dense, mp_policy=exact)
            fully_shard(layer, mesh=dense, mp_policy=policy)
        fully_shard(root, mesh=dense, mp_policy=policy)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    # --- train.step.Alone

    def summed(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers, group=self.meshes.group("data"))
        return numbers

    def told(self, numbers: Tensor) -> Tensor:
        """Over ranks with other samples and other stages."""
        if self.of.pp > 1:
            dist.all_reduce(numbers, group=self.meshes.group("pp"))
        return self.summed(numbers)

    def summed_over_all(self, number: Tensor) -> Tensor:
        dist.all_reduce(number)
        return number

    def run(self, model: Trained, micros: Sequence[Micro]) -> Sums:
        if self._pipeline is not None:
            return self._pipeline.run(micros)
        return run_in_turn(model, micros, before=self._before if isinstance(model, FSDPModule) else None)

    def _before(self, model: Any, is_last: bool) -> None:
        """Gradients are summed over ranks once a step, not once a micro-batch."""
        model.set_requires_gradient_sync(is_last)

    def look(self, model: Trained, micros: Sequence[Micro]) -> Tensor:
        if self._pipeline is not None:
            return self._pipeline.look(micros)
        return torch.stack([model(micro).entropy for micro in micros]).sum()

    def finish(self, parameters: Mapping[str, Tensor]) -> None:
        if self.of.tp > 1:
            self._sum_over_slices(parameters)
        if self.meshes.dense_mesh is None and self.dp_size > 1:
            self._sum_over_samples(parameters)

    def _sum_over_samples(self, parameters: Mapping[str, Tensor]) -> None:
        """Without FSDP: whoever has the same weights."""
        dense, experts = list[Tensor](), list[Tensor]()
        for name, parameter in parameters.items():
            (experts if self._is_spread(name) else dense).append(_gradient(parameter))
        _sum_together(dense, self.meshes.group("data"))
        if experts:
            _sum_together(experts, self.meshes.group("copies"))

    def _sum_over_slices(self, parameters: Mapping[str, Tensor]) -> None:
        """Within a half layer, what every slice has whole has a gradient of its own heads, channels or experts only."""
        found: list[Tensor] = []
        whole: list[tuple[Tensor, Tensor]] = []
        for name, parameter in parameters.items():
            for part, gradient in self.places(self._slabs[name], _gradient(parameter)):
                if part.name in self._alike and _is_within(part):
                    found.append(gradient)
                elif self._is_shared(part):
                    room = gradient.new_zeros(part.shape)
                    held = room[tuple(slice(*interval) for interval in part.held)]
                    held.copy_(gradient)
                    whole.append((gradient, held))
                    found.append(room)
        _sum_together(found, self.meshes.group("tp"))
        for gradient, held in whole:
            gradient.copy_(held)

    def share(self, name: str) -> float | Tensor:
        slab, parameter_dp = self._slabs[name], self.of.copies if self._is_spread(name) else self.of.dp
        spread = 1 if self.meshes.dense_mesh is None else self.meshes.of.fsdp
        if self._is_spread(name) and self.meshes.dense_mesh is not None:
            spread = self.of.copies
        samples = parameter_dp / max(spread, 1)
        if self.of.tp == 1:
            return 1 / samples
        if not any(self._is_shared(part) for part in slab.parts):
            return 1 / (samples * (self.of.tp if slab.parts[0].name in self._alike else 1))
        return self._shares_of_rows(name) / samples

    def _shares_of_rows(self, name: str) -> Tensor:
        """Per row of this rank's part of a parameter: one over the slices that hold it."""
        slab = self._slabs[name]
        rows = torch.ones(slab.shape, dtype=torch.float64, device=self.device)
        for part, view in slab.split(rows):
            if self._is_shared(part):
                view.copy_(view / self._holders(part).view(-1, *[1] * (view.dim() - 1)))
        return self._own_rows(name, rows)

    def _own_rows(self, name: str, rows: Tensor) -> Tensor:
        if self.meshes.dense_mesh is None:
            return rows
        first, last = self._rows_here(rows.shape[0], self.meshes.dense_mesh)
        return rows[first:last]

    def _holders(self, part: Part) -> Tensor:
        intervals = _kv_cut(self.placement, part)
        unit = part.shape[0] // max(last for _, last in intervals)
        counts = torch.zeros(part.shape[0], dtype=torch.float64, device=self.device)
        for first, last in intervals:
            counts[first * unit : last * unit] += 1
        return counts[slice(*part.held[0])]

    def _is_shared(self, part: Part) -> bool:
        """Heads of keys and values that two slices both ask."""
        if not part.name.endswith((".mixer.k.weight", ".mixer.v.weight", ".mixer.k.bias", ".mixer.v.bias")):
            return False
        intervals = _kv_cut(self.placement, part)
        return sum(last - first for first, last in intervals) > max((last for _, last in intervals), default=0)

    def _is_spread(self, name: str) -> bool:
        return self.of.ep > 1 and ".experts." in self._slabs[name].parts[0].name

    def routed(self, loads: list[Tensor]) -> list[Tensor]:
        """Of all stages, in order."""
        if self.of.pp == 1:
            return loads
        found: list[list[list[int]] | None] = [None] * self.of.pp
        dist.all_gather_object(found, [load.tolist() for load in loads], group=self.meshes.group("pp"))
        return [torch.tensor(load) for stage in found for load in stage or ()]

    def owned(self, part: Part) -> Part:
        """Heads of keys and values that several slices hold are the first one's to save."""
        if self.of.tp == 1 or not self._is_shared(part):
            return part
        intervals = _kv_cut(self.placement, part)
        unit = part.shape[0] // max(last for _, last in intervals)
        before = max((last for _, last in intervals[: self.meshes.tp_rank]), default=0) * unit
        (first, last), rest = part.held[0], part.held[1:]
        return Part(part.name, part.shape, ((min(max(first, before), last), last), *rest))

    def places(self, slab: Slab, tensor: Tensor) -> Iterable[tuple[Part, Tensor]]:
        if not isinstance(tensor, DTensor):
            return slab.split(tensor)
        local = tensor.to_local()
        first, _ = self._rows_here(tensor.shape[0], tensor.device_mesh)
        return slab.split_rows(local, first)

    def _rows_here(self, count: int, mesh: Any) -> tuple[int, int]:
        """Of a parameter that FSDP has cut: as torch.chunk does, over the last axis of its mesh."""
        size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        chunk = ceil(count / size)
        return min(rank * chunk, count), min((rank + 1) * chunk, count)


def _reduced(compute: torch.dtype) -> torch.dtype:
    """Gradients are summed over ranks in fp32 at least."""
    return torch.promote_types(compute, torch.float32)


def _check(spec: ModelSpec, pp: int) -> None:
    if pp > 1 and spec.tied_head:
        raise Impossible(
            "this model's head is its table of tokens, which the first and the last stage would both have: train it without pp"
        )


def _kv_cut(placement: Placement, part: Part) -> tuple[tuple[int, int], ...]:
    found = [made.intervals for made in placement.cuts if made.name is AxisName.KV_HEADS and part.shape[0] % made.count == 0]
    return found[0] if found else ()


def _is_whole(part: Part) -> bool:
    """As far as slices go (ep spreads experts too); but for biases that one of them adds for all."""
    skipped = 1 if ".experts." in part.name else 0
    return part.sizes[skipped:] == part.shape[skipped:] and not part.name.endswith((".o.bias", ".down.bias"))


def _is_within(part: Part) -> bool:
    """Of a half layer, where each slice sees its own heads or channels alone, so that its gradient is a part."""
    return part.name.startswith("layers.") and part.name.split(".")[2] in ("mixer", "ffn")


def _gradient(parameter: Tensor) -> Tensor:
    """Nought where nothing reached it: ranks sum the same things."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _sum_together(gradients: list[Tensor], group: Any) -> None:
    """In a few large sums, whatever their shapes."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        bucket.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        if sum(one.numel() for one in bucket) >= BUCKET_ELEMENTS:
            _sum_bucket(bucket, group)
            bucket = []
    _sum_bucket(bucket, group)


def _sum_bucket(bucket: list[Tensor], group: Any) -> None:
    for dtype in dict.fromkeys(one.dtype for one in bucket):
        some = [one for one in bucket if one.dtype == dtype]
        flat = torch.cat([one.flatten() for one in some])
        dist.all_reduce(flat, group=group)
        for one, summed in zip(some, flat.split([one.numel() for one in some]), strict=True):
            one.copy_(summed.view(one.shape))
