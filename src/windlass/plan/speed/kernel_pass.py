"""A stage of a fitted layout as passes through our own kernels: who has them, what each device holds, how long its layers take."""

from __future__ import annotations

from collections import Counter

from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.plan.memory import DeviceSlot, Fit, MemoryModel, Offloaded
from windlass.plan.shards import TpShard, busiest_share, touched_share
from windlass.plan.speed.kernels import KernelModel, LayerShape, applies, layer_shapes


def head_reads(spec: ModelSpec, shard: TpShard) -> float:
    """Bytes of the output head; a tied one is the table of embeddings."""
    return shard.head_bytes + (shard.embed_bytes if spec.tied_head else 0.0)


class KernelPass:
    def __init__(self, model: MemoryModel, layout: Layout, fit: Fit) -> None:
        self.model, self.layout, self.fit = model, layout, fit
        self._kernels: dict[str, KernelModel | None] = {}
        self._shapes: dict[int, tuple[LayerShape, ...]] = {}

    def runs(self, seat: DeviceSlot, moved: Offloaded) -> bool:
        """Not where weights come from slower tiers."""
        return not (moved.host or moved.disk) and self._kernels_on(seat) is not None

    def seconds(self, seat: DeviceSlot, rows: int, sequences: int, context: int) -> float:
        """`rows` through the layers of a stage, each looking at `context` tokens, and a row of each sequence through the head."""
        kernels, spec, layers = self._kernels_on(seat), self.model.spec, self.fit.stages[seat.pp]
        assert kernels is not None
        crowd = busiest_share(spec, rows, self.layout.ep) / touched_share(spec, rows) if spec.experts else 1.0
        held = self._shapes_of(seat)[layers[0] : layers[1]]
        alike = {id(shape): shape for shape in held}
        counts = Counter(map(id, held))
        total = sum(counts[key] * kernels.layer(shape, rows, sequences, context, crowd=crowd) for key, shape in alike.items())
        if not self.model.is_last(layers):
            return total
        shard = self.model.sizes.shard(self.layout, self.model.scheme, seat.tp, self.fit.shares)
        return total + kernels.step(head_reads(spec, shard), shard.vocab, sequences)

    def _kernels_on(self, seat: DeviceSlot) -> KernelModel | None:
        device, times = seat.device, self.model.engine.kernel_times
        if device.name not in self._kernels:
            known = times is not None and applies(self.model.spec, self.model.scheme, device)
            self._kernels[device.name] = KernelModel(times, device) if known and times else None
        return self._kernels[device.name]

    def _shapes_of(self, seat: DeviceSlot) -> tuple[LayerShape, ...]:
        if seat.tp not in self._shapes:
            model = self.model
            placement = model.sizes.placement(self.layout, model.scheme, self.fit.shares)
            self._shapes[seat.tp] = layer_shapes(model.spec, model.sizes.rules, placement, self.layout, model.scheme, seat.tp)
        return self._shapes[seat.tp]
