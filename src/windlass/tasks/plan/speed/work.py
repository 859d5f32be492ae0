"""Bytes and FLOPs that one device moves in a step, and the seconds they take at an engine's rates."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.core.model import LatentAttention, ModelSpec, MoE
from windlass.core.place import Interval
from windlass.tasks.plan.engines.profile import Rates


@dataclass(frozen=True)
class Work:
    """One step of one device; the weights are read once."""

    dense_bytes: float
    expert_bytes: float
    """Of routed experts that the step's tokens chose and that are read from the device's own memory."""
    cache_bytes: float
    dense_flops: float
    expert_flops: float
    score_flops: float
    rows_per_expert: float
    one_expert: float
    """Bytes of one expert on this device."""
    latent: bool
    packed: bool = False
    """Dense matrices of fewer than 8 bits."""
    width: int = 0
    """Inputs of a dense matrix."""
    passes: int = 1
    """How often the weights are read: once per step or per prefill chunk."""

    def seconds(self, bandwidth: float, flops: float, rates: Rates) -> tuple[float, float]:
        """(bound by memory, bound by products): dense matrices, experts and attention follow each other, each at the slower of its two."""
        pairs = self.parts(bandwidth, flops, rates).values()
        return sum(read for read, product in pairs if read >= product), sum(product for read, product in pairs if read < product)

    def floor(self, bandwidth: float, flops: float) -> tuple[float, float]:
        """The same without losses, if all reads and all products overlapped."""
        read = (self.passes * (self.dense_bytes + self.expert_bytes) + self.cache_bytes) / bandwidth
        product = (self.dense_flops + self.expert_flops + self.score_flops) / flops
        return (read, 0.0) if read >= product else (0.0, product)

    def parts(self, bandwidth: float, flops: float, rates: Rates) -> dict[str, tuple[float, float]]:
        """(seconds of reads, seconds of products) of each kind of work."""
        small = self.one_expert / (self.one_expert + rates.half_expert) if self.one_expert else 1.0
        filled = self.rows_per_expert / (self.rows_per_expert + rates.half_rows)
        long = self.width / (self.width + rates.half_width) if self.width else 1.0
        cache = rates.latent_cache if self.latent else rates.cache
        read = self.passes * self.expert_bytes / (rates.expert_read * small) / bandwidth
        product = self.expert_flops / (rates.expert_product * filled) / flops
        return {
            "dense": (
                self.passes * self.dense_bytes / (rates.read * (rates.packed if self.packed else 1.0)) / bandwidth,
                self.dense_flops / (rates.product * long) / flops,
            ),
            # Few rows are multiplied one by one, reading an expert for each, rather than in tiles that stay empty.
            "experts": (read, min(product, max(read * self.rows_per_expert, product * filled)) if read else product),
            "attention": (self.cache_bytes / cache / bandwidth, self.score_flops / rates.score / flops),
        }


def launch_seconds(spec: ModelSpec, layers: Interval, rates: Rates, cores: int) -> float:
    """Of the layers, beyond their bytes and FLOPs."""
    seconds = 0.0
    for layer in spec.layers[layers[0] : layers[1]]:
        routed = isinstance(layer.feed_forward, MoE)
        latent = isinstance(layer.mixer, LatentAttention)
        seconds += rates.latent_seconds if latent else rates.attention_seconds
        seconds += rates.moe_seconds if routed else rates.dense_seconds
        seconds += cores * (rates.moe_core_seconds if routed else rates.core_seconds)
    return seconds
