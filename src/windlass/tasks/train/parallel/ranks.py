"""One rank of a training mesh: its shard of the model, its samples, and all communication of a step.

Losses are means over the whole step, so gradients are summed over data-parallel ranks and never divided by their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from windlass.core.recipe.sections import ParallelSection
from windlass.core.rule import AxisName, Rule
from windlass.core.scheme import scheme
from windlass.errors import Impossible
from windlass.runtime.nn.moe import MixtureOfExperts
from windlass.runtime.nn.parallel.shard import ModelShard
from windlass.runtime.parallel.autograd import AutogradGroup
from windlass.runtime.parallel.groups import Groups
from windlass.runtime.weights.tensors.shards import RankShare
from windlass.tasks.train.model.model import MicroBatch, TrainingModel
from windlass.tasks.train.model.packing import IGNORED
from windlass.tasks.train.parallel.degrees import degrees
from windlass.tasks.train.parallel.dispatch import DispatchedExperts
from windlass.tasks.train.parallel.meshes import Meshes
from windlass.tasks.train.parallel.rank_clock import RankClock
from windlass.tasks.train.parallel.reduce import all_reduce_gradients, gradient_of
from windlass.tasks.train.parallel.stages import Pipeline, StageModule
from windlass.tasks.train.params.layout import ParameterLayout, TensorSlice
from windlass.tasks.train.progress import RankTimes
from windlass.tasks.train.step import SingleRank, StepLosses, accumulate_gradients


@dataclass(frozen=True)
class RankPosition:
    """Rank and size of a group, for a ModelShard that does not communicate over it."""

    rank: int
    size: int
    is_native: bool = False


class MeshRank(SingleRank):
    """One rank of a mesh of processes."""

    def __init__(self, parallel: ParallelSection, spec: ModelSpec, rules: tuple[Rule, ...], device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.of = degrees(parallel, self.world)
        self.spec, self.device = spec, device
        _check(spec, self.of.pp)
        self.meshes = Meshes(device.type, self.of)
        self.dp_rank, self.dp_size = self.meshes.dp_rank, self.of.dp
        self.owns_losses = self.meshes.tp_rank == 0
        self.placement = place(rules, spec.num_layers, Layout(tp=self.of.tp, pp=self.of.pp), scheme("bf16"))
        self.shard, self.weight_share = self._shard(), self._weight_share()
        self._layouts: Mapping[str, ParameterLayout] = {}
        self._replicated: set[str] = set()
        """Tensors that every tp rank holds whole."""
        self._pipeline: Pipeline | None = None
        self.clock = RankClock() if device.type == "cpu" else None

    # --- the shard of this rank

    def _shard(self) -> ModelShard:
        tp: Any = AutogradGroup(self.meshes.group("tp"))
        groups = Groups(tp, RankPosition(self.meshes.pp_rank, self.of.pp))  # type: ignore[arg-type]
        return ModelShard(self.placement, Layout(tp=self.of.tp, pp=self.of.pp), groups)

    def _weight_share(self) -> RankShare:
        placement = self.placement
        if placement.experts and self.of.ep > 1:
            (whole,) = placement.experts
            placement = msgspec.structs.replace(placement, experts=cut(whole[1], 1, [1.0] * self.of.ep))
            return RankShare(placement=placement, tp_index=self.meshes.tp_rank, ep_index=self.meshes.ep_rank)
        return RankShare(placement=placement, tp_index=self.meshes.tp_rank)

    def expert_intervals(self) -> Placement:
        placement = self.weight_share.placement
        assert placement is not None
        return placement

    def dispatch_experts(self, model: TrainingModel) -> None:
        """Wraps experts for all-to-all dispatch. Call before parameter layouts are taken."""
        if self.of.ep == 1:
            return
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                module.experts = DispatchedExperts(module.experts, self.expert_intervals().experts, self.meshes.group("ep"))  # type: ignore[arg-type]

    def shard_model(self, model: TrainingModel, layouts: Mapping[str, ParameterLayout], compute: torch.dtype) -> bool:
        """Applies FSDP and pipeline stages. Returns whether FSDP casts to `compute`, so that no master weights are needed."""
        self._layouts = layouts
        self._replicated = {part.name for layout in layouts.values() for part in layout.parts if _is_whole(part)}
        if self.of.tp > 1:
            model.head_loss = self._head_loss(model)
        root: nn.Module = model
        if self.of.pp > 1:
            root = StageModule(model)
            self._pipeline = Pipeline(root, self.meshes.group("pp"), self.device)
        if self.meshes.dense_mesh is None:
            return False
        self._shard_all(model, root, compute)
        return True

    def _head_loss(self, model: TrainingModel) -> Any:
        vocabulary: Any = model.decoder.vocabulary
        return lambda hidden, head, targets, z: vocabulary.loss(hidden, head, targets, z, IGNORED)

    def _shard_all(self, model: TrainingModel, root: nn.Module, compute: torch.dtype) -> None:
        """Innermost first: experts over ranks with the same ones, routers in full precision, layers, the rest."""
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=_reduce_type(compute), cast_forward_inputs=False)
        exact = MixedPrecisionPolicy(reduce_dtype=_reduce_type(compute), cast_forward_inputs=False)
        dense, experts = self.meshes.dense_mesh, self.meshes.expert_mesh
        layers = [*model.decoder.layers, *([model.mtp.layer] if model.mtp is not None else [])]
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

    # --- communication of a step

    def sum_over_data(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers, group=self.meshes.group("data"))
        return numbers

    def sum_over_data_and_stages(self, numbers: Tensor) -> Tensor:
        """Over ranks with different samples and stages."""
        if self.of.pp > 1:
            dist.all_reduce(numbers, group=self.meshes.group("pp"))
        return self.sum_over_data(numbers)

    def sum_over_all(self, number: Tensor) -> Tensor:
        dist.all_reduce(number)
        return number

    def _timed(self, part: str) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.part(part)

    def end_step(self, seconds: float) -> tuple[RankTimes, ...]:
        return () if self.clock is None else self.clock.end_step(seconds)

    def run(self, model: TrainingModel, micros: Sequence[MicroBatch]) -> StepLosses:
        with self._timed("model"):
            return self._run(model, micros)

    def _run(self, model: TrainingModel, micros: Sequence[MicroBatch]) -> StepLosses:
        if self._pipeline is not None:
            return self._pipeline.run(micros)
        return accumulate_gradients(model, micros, before=self._before if isinstance(model, FSDPModule) else None)

    def _before(self, model: Any, is_last: bool) -> None:
        """Gradients are reduced once per step, not per micro-batch."""
        model.set_requires_gradient_sync(is_last)

    def evaluate(self, model: TrainingModel, micros: Sequence[MicroBatch]) -> Tensor:
        if self._pipeline is not None:
            return self._pipeline.evaluate(micros)
        return torch.stack([model(micro).entropy for micro in micros]).sum()

    def reduce_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        with self._timed("gradients"):
            if self.of.tp > 1:
                self._reduce_over_tp(parameters)
            if self.meshes.dense_mesh is None and self.dp_size > 1:
                self._reduce_over_data(parameters)

    def _reduce_over_data(self, parameters: Mapping[str, Tensor]) -> None:
        """Without FSDP: over ranks with the same weights."""
        dense, experts = list[Tensor](), list[Tensor]()
        for name, parameter in parameters.items():
            (experts if self._is_expert_parallel(name) else dense).append(gradient_of(parameter))
        all_reduce_gradients(dense, self.meshes.group("data"))
        if experts:
            all_reduce_gradients(experts, self.meshes.group("copies"))

    def _reduce_over_tp(self, parameters: Mapping[str, Tensor]) -> None:
        """Replicated tensors inside a tensor-parallel region have a partial gradient on each rank: of its heads, channels or experts."""
        found: list[Tensor] = []
        whole: list[tuple[Tensor, Tensor]] = []
        for name, parameter in parameters.items():
            for part, gradient in self.local_slices(self._layouts[name], gradient_of(parameter)):
                if part.name in self._replicated and _is_in_tp_region(part):
                    found.append(gradient)
                elif self._is_shared(part):
                    room = gradient.new_zeros(part.shape)
                    held = room[tuple(slice(*interval) for interval in part.held)]
                    held.copy_(gradient)
                    whole.append((gradient, held))
                    found.append(room)
        all_reduce_gradients(found, self.meshes.group("tp"))
        for gradient, held in whole:
            gradient.copy_(held)

    def norm_weight(self, name: str) -> float | Tensor:
        layout, parameter_dp = self._layouts[name], self.of.copies if self._is_expert_parallel(name) else self.of.dp
        spread = 1 if self.meshes.dense_mesh is None else self.meshes.of.fsdp
        if self._is_expert_parallel(name) and self.meshes.dense_mesh is not None:
            spread = self.of.copies
        samples = parameter_dp / max(spread, 1)
        if self.of.tp == 1:
            return 1 / samples
        if not any(self._is_shared(part) for part in layout.parts):
            return 1 / (samples * (self.of.tp if layout.parts[0].name in self._replicated else 1))
        return self._row_weights(name) / samples

    def _row_weights(self, name: str) -> Tensor:
        """Per local row of a parameter: one over the number of tp ranks that hold it."""
        layout = self._layouts[name]
        rows = torch.ones(layout.shape, dtype=torch.float64, device=self.device)
        for part, view in layout.split(rows):
            if self._is_shared(part):
                view.copy_(view / self._holders(part).view(-1, *[1] * (view.dim() - 1)))
        return self._local_rows(rows)

    def _local_rows(self, rows: Tensor) -> Tensor:
        if self.meshes.dense_mesh is None:
            return rows
        first, last = self._fsdp_rows(rows.shape[0], self.meshes.dense_mesh)
        return rows[first:last]

    def _holders(self, part: TensorSlice) -> Tensor:
        intervals = _kv_cut(self.placement, part)
        unit = part.shape[0] // max(last for _, last in intervals)
        counts = torch.zeros(part.shape[0], dtype=torch.float64, device=self.device)
        for first, last in intervals:
            counts[first * unit : last * unit] += 1
        return counts[slice(*part.held[0])]

    def _is_shared(self, part: TensorSlice) -> bool:
        """KV heads that several tp ranks hold, because there are fewer KV heads than ranks or they do not divide."""
        if not part.name.endswith((".mixer.k.weight", ".mixer.v.weight", ".mixer.k.bias", ".mixer.v.bias")):
            return False
        intervals = _kv_cut(self.placement, part)
        return sum(last - first for first, last in intervals) > max((last for _, last in intervals), default=0)

    def _is_expert_parallel(self, name: str) -> bool:
        return self.of.ep > 1 and ".experts." in self._layouts[name].parts[0].name

    def gather_loads(self, loads: list[Tensor]) -> list[Tensor]:
        """Of all stages, in layer order."""
        if self.of.pp == 1:
            return loads
        found: list[list[list[int]] | None] = [None] * self.of.pp
        dist.all_gather_object(found, [load.tolist() for load in loads], group=self.meshes.group("pp"))
        return [torch.tensor(load) for stage in found for load in stage or ()]

    def saved_slice(self, part: TensorSlice) -> TensorSlice:
        """KV heads held by several tp ranks are saved by the first of them."""
        if self.of.tp == 1 or not self._is_shared(part):
            return part
        intervals = _kv_cut(self.placement, part)
        unit = part.shape[0] // max(last for _, last in intervals)
        before = max((last for _, last in intervals[: self.meshes.tp_rank]), default=0) * unit
        (first, last), rest = part.held[0], part.held[1:]
        return TensorSlice(part.name, part.shape, ((min(max(first, before), last), last), *rest))

    def local_slices(self, layout: ParameterLayout, tensor: Tensor) -> Iterable[tuple[TensorSlice, Tensor]]:
        if not isinstance(tensor, DTensor):
            return layout.split(tensor)
        local = tensor.to_local()
        first, _ = self._fsdp_rows(tensor.shape[0], tensor.device_mesh)
        return layout.split_rows(local, first)

    def _fsdp_rows(self, count: int, mesh: Any) -> tuple[int, int]:
        """Local rows of a parameter sharded by FSDP: as torch.chunk, over the last axis of its mesh."""
        size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        chunk = ceil(count / size)
        return min(rank * chunk, count), min((rank + 1) * chunk, count)


def _reduce_type(compute: torch.dtype) -> torch.dtype:
    """Gradients are reduced in at least fp32."""
    return torch.promote_types(compute, torch.float32)


def _check(spec: ModelSpec, pp: int) -> None:
    if pp > 1 and spec.tied_head:
        raise Impossible(
            "pp is not supported with tied embeddings: the first and the last stage would both hold them; train without pp"
        )


def _kv_cut(placement: Placement, part: TensorSlice) -> tuple[tuple[int, int], ...]:
    found = [made.intervals for made in placement.cuts if made.name is AxisName.KV_HEADS and part.shape[0] % made.count == 0]
    return found[0] if found else ()


def _is_whole(part: TensorSlice) -> bool:
    """Replicated over tp (experts may still be sharded by ep); except biases, which one rank adds for all."""
    skipped = 1 if ".experts." in part.name else 0
    return part.sizes[skipped:] == part.shape[skipped:] and not part.name.endswith((".o.bias", ".down.bias"))


def _is_in_tp_region(part: TensorSlice) -> bool:
    """In attention or a feed-forward, where each tp rank computes only its heads or channels, so gradients are partial sums."""
    return part.name.startswith("layers.") and part.name.split(".")[2] in ("mixer", "ffn")
