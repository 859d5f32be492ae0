"""Bytes and FLOPs that one device moves in a step, and the seconds they take at an engine's rates."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.core.count import mixer_flops
from windlass.core.model import LatentAttention, ModelSpec, MoE
from windlass.core.place import Interval
from windlass.plan.engines.profile import Rates


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
    latent: bool
    passes: int = 1
    """How often the weights are read: once per step or per prefill chunk."""

    def memory_seconds(self, bandwidth: float, rates: Rates) -> float:
        cache = rates.latent_cache if self.latent else rates.cache
        weights = self.dense_bytes / rates.read + self.expert_bytes / rates.expert_read
        return (self.passes * weights + self.cache_bytes / cache) / bandwidth

    def compute_seconds(self, flops: float, rates: Rates) -> float:
        filled = self.rows_per_expert / (self.rows_per_expert + rates.half_rows) if self.expert_flops else 1.0
        experts = self.expert_flops / (rates.expert_product * filled) if self.expert_flops else 0.0
        return (self.dense_flops / rates.product + experts + self.score_flops / rates.score) / flops


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


def score_flops(spec: ModelSpec, layers: Interval, context: float) -> float:
    """Attention of one token over `context` keys, limited by windows and sparse attention."""
    mixers = [layer.mixer for layer in spec.layers[layers[0] : layers[1]]]
    known: dict[int, float] = {}
    return sum(known.setdefault(id(mixer), mixer_flops(mixer, context)) for mixer in mixers)


def routed_layers(spec: ModelSpec, layers: Interval) -> int:
    return sum(isinstance(layer.feed_forward, MoE) for layer in spec.layers[layers[0] : layers[1]])
