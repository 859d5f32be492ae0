"""Time of a pipeline stage in our fused kernels: which devices have them, and how long their layers take."""

from __future__ import annotations

from collections import Counter

from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.tasks.plan.memory import DeviceSlot, Fit, MemoryModel, Offloaded
from windlass.tasks.plan.shards import TpShard, busiest_share, touched_share
from windlass.tasks.plan.speed.kernels import KernelModel, LayerShape, applies, layer_shapes


def head_reads(spec: ModelSpec, shard: TpShard) -> float:
    """Bytes of the output head; with tied embeddings, of the embedding table."""
    return shard.head_bytes + (shard.embed_bytes if spec.tied_head else 0.0)


class KernelPass:
    def __init__(self, model: MemoryModel, layout: Layout, fit: Fit) -> None:
        self.model, self.layout, self.fit = model, layout, fit
        self._kernels: dict[str, KernelModel | None] = {}
        self._shapes: dict[int, tuple[LayerShape, ...]] = {}

    def runs(self, slot: DeviceSlot, moved: Offloaded) -> bool:
        """Not with offloaded weights."""
        return not (moved.host or moved.disk) and self._kernels_on(slot) is not None

    def has(self, slot: DeviceSlot) -> bool:
        """Whether the device has them for this model. With these, experts may lie in host memory, where the CPU computes a part of them."""
        return self._kernels_on(slot) is not None

    def seconds(self, slot: DeviceSlot, rows: int, sequences: int, context: int) -> float:
        """`rows` tokens through the layers of a stage, each attending to `context` tokens, and one row per sequence through the head."""
        kernels, spec, layers = self._kernels_on(slot), self.model.spec, self.fit.stages[slot.pp]
        assert kernels is not None
        crowd = busiest_share(spec, rows, self.layout.ep) / touched_share(spec, rows) if spec.experts else 1.0
        held = self._shapes_of(slot)[layers[0] : layers[1]]
        distinct = {id(shape): shape for shape in held}
        counts = Counter(map(id, held))
        total = sum(counts[key] * kernels.layer(shape, rows, sequences, context, crowd=crowd) for key, shape in distinct.items())
        if not self.model.is_last(layers):
            return total
        shard = self.model.sizes.shard(self.layout, self.model.scheme, slot.tp, self.fit.shares)
        return total + kernels.step(head_reads(spec, shard), shard.vocab, sequences)

    def _kernels_on(self, slot: DeviceSlot) -> KernelModel | None:
        device, times = slot.device, self.model.engine.kernel_times
        if device.name not in self._kernels:
            known = times is not None and applies(self.model.spec, self.model.scheme, device)
            self._kernels[device.name] = KernelModel(times, device) if known and times else None
        return self._kernels[device.name]

    def _shapes_of(self, slot: DeviceSlot) -> tuple[LayerShape, ...]:
        if slot.tp not in self._shapes:
            model = self.model
            placement = model.sizes.placement(self.layout, model.scheme, self.fit.shares)
            self._shapes[slot.tp] = layer_shapes(model.spec, model.sizes.rules, placement, self.layout, model.scheme, slot.tp)
        return self._shapes[slot.tp]
