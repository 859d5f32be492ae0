"""The shard of a model that a rank holds, and its groups: intervals of a placement.

A sharded decoder must be built from weights of the same placement and tp index.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.core.layout import Layout
from windlass.core.model import Attention, Mixer, ModelSpec
from windlass.core.place import Interval, Placement
from windlass.core.rule import Axis, AxisName
from windlass.errors import Impossible
from windlass.runtime.parallel.groups import SOLO, Groups

ONE = Layout()


@dataclass(frozen=True)
class ModelShard:
    """`Shard()` is the whole model, on one device."""

    placement: Placement | None = None
    layout: Layout = ONE
    groups: Groups = SOLO

    def __post_init__(self) -> None:
        if self.layout.ep > self.layout.tp:
            raise Impossible(
                f"ep {self.layout.ep} exceeds tp {self.layout.tp}: experts are distributed over the tensor-parallel ranks; choose ep <= tp"
            )

    @property
    def is_whole(self) -> bool:
        return self.groups.tp.size == self.groups.pp.size == 1

    @property
    def has_whole_layers(self) -> bool:
        """All of the model, or a pipeline stage of it."""
        return self.groups.tp.size == 1

    @property
    def tp_index(self) -> int:
        return self.groups.tp.rank

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias of row-parallel matrices (split along their inputs): only one may."""
        return self.tp_index == 0

    @property
    def adds_expert_bias(self) -> bool:
        """The same among the ranks that share an expert."""
        return self.tp_index % self.layout.expert_tp == 0

    @property
    def is_first(self) -> bool:
        return self.groups.pp.rank == 0

    @property
    def is_last(self) -> bool:
        return self.groups.pp.rank == self.groups.pp.size - 1

    def layers(self, spec: ModelSpec) -> Interval:
        return (0, spec.num_layers) if self.placement is None else self.placement.stages[self.groups.pp.rank]

    def heads(self, count: int) -> Interval:
        return self._interval(AxisName.HEADS, count)

    def kv_heads(self, count: int) -> Interval:
        return self._interval(AxisName.KV_HEADS, count)

    def vocabulary(self, count: int) -> tuple[Interval, ...]:
        """The interval of every tp rank."""
        return tuple(self._interval(AxisName.VOCAB, count, index) for index in range(self.groups.tp.size))

    def experts(self, count: int) -> Interval:
        if self.placement is None or not self.placement.experts:
            return 0, count
        return self.placement.experts[self.tp_index // self.layout.expert_tp]

    def _interval(self, name: AxisName, count: int, index: int | None = None) -> Interval:
        if self.placement is None:
            return 0, count
        return self.placement.interval(Axis(name=name, count=count), self.tp_index if index is None else index)


WHOLE = ModelShard()


def kv_share(shard: ModelShard, spec: ModelSpec) -> float:
    """Of the bytes of a token's KV cache: what this rank holds. Ranks that share a KV head all hold it, as all hold a latent."""

    def held(mixer: Mixer) -> float:
        if not isinstance(mixer, Attention):
            return float(mixer.kv_elements)
        first, last = shard.kv_heads(mixer.num_kv_heads)
        return mixer.kv_elements * (last - first) / mixer.num_kv_heads

    whole = sum(layer.mixer.kv_elements for layer in spec.layers)
    return sum(held(layer.mixer) for layer in spec.layers[slice(*shard.layers(spec))]) / whole if whole else 0.0
