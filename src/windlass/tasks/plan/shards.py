"""Bytes and FLOPs of one tp rank, layer by layer: the input of both the memory and the speed model.

Totals are prefix sums over layers, so that a search over thousands of layouts is cheap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from windlass.core.count import distinct_experts, mixer_flops
from windlass.core.layout import Layout
from windlass.core.model import Attention, ModelSpec, MoE, layer_cache_bytes
from windlass.core.place import Interval, Placement, local_bytes, local_experts, local_shape, place
from windlass.core.rule import Axis, AxisName, ModelPart, Role, Rule
from windlass.core.scheme import Scheme


def _running(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))


@dataclass(frozen=True)
class TpShard:
    """One tp rank of one layout, all layers; fields are prefix sums: `a[stop] - a[start]` is the sum over layers start..stop."""

    always: tuple[float, ...]
    """Weight bytes that every token reads."""
    experts: tuple[float, ...]
    """Weight bytes of the routed experts held here."""
    flops_per_token: tuple[float, ...]
    """Matmul FLOPs of one token on this rank."""
    expert_flops: tuple[float, ...]
    """Those of its routed experts."""
    score_width: tuple[float, ...]
    """Multiply-adds per (query, key) pair on this rank."""
    embed_bytes: float
    head_bytes: float
    head_flops_per_token: float
    widest: int
    """The widest activation of a layer, in elements per token."""
    kv_share: float
    """Fraction of a layer's KV cache on this rank."""
    vocab: int

    def between(self, totals: tuple[float, ...], layers: Interval) -> float:
        return totals[layers[1]] - totals[layers[0]]


def make_shard(
    spec: ModelSpec, rules: tuple[Rule, ...], placement: Placement, layout: Layout, scheme: Scheme, tp_index: int
) -> TpShard:
    always, experts, flops, expert_flops = ([0.0] * spec.num_layers for _ in range(4))
    embed = head = 0.0
    held = local_experts(placement, layout, tp_index)
    for rule in rules:
        if rule.part is not ModelPart.MAIN or rule.copy_of is not None:
            continue
        size = local_bytes(rule, placement, scheme, tp_index)
        if rule.layers is None:
            if rule.role is Role.LOOKUP:
                embed += size
            else:
                head += size
            continue
        operations = _matrix_operations(rule, local_shape(rule, placement, tp_index), layout)
        for layer in rule.layers:
            if rule.num_experts:
                experts[layer] += size * held
                expert_flops[layer] += operations
            else:
                always[layer] += size
            flops[layer] += operations
    return TpShard(
        always=_running(always),
        experts=_running(experts),
        flops_per_token=_running(flops),
        expert_flops=_running(expert_flops),
        score_width=_running(layer.mixer.score_width / layout.tp for layer in spec.layers),
        embed_bytes=embed,
        head_bytes=head,
        head_flops_per_token=2.0 * spec.hidden_size * spec.vocab_size / layout.tp,
        widest=_widest(spec, rules, placement, layout, tp_index),
        kv_share=_kv_share(spec, placement, tp_index),
        vocab=_extent(placement, Axis(name=AxisName.VOCAB, count=spec.vocab_size), tp_index),
    )


def _matrix_operations(rule: Rule, shape: tuple[int, ...], layout: Layout) -> float:
    """Two FLOPs per weight. The experts chosen for a token are assumed evenly spread over the ep ranks."""
    if rule.role is not Role.MATRIX:
        return 0.0
    return 2.0 * shape[0] * shape[1] * (rule.num_active / min(layout.ep, layout.tp) if rule.num_experts else 1)


def _extent(placement: Placement, axis: Axis, tp_index: int) -> int:
    start, stop = placement.interval(axis, tp_index)
    return (stop - start) * axis.unit


def _kv_share(spec: ModelSpec, placement: Placement, tp_index: int) -> float:
    """KV heads on this rank over all KV heads; a latent (MLA) cache is replicated on every rank."""
    mixer = spec.attention
    if not isinstance(mixer, Attention):
        return 1.0
    return _extent(placement, Axis(name=AxisName.KV_HEADS, count=mixer.num_kv_heads), tp_index) / mixer.num_kv_heads


def _widest(spec: ModelSpec, rules: tuple[Rule, ...], placement: Placement, layout: Layout, tp_index: int) -> int:
    """Outputs that live at once: gate and up, or Q, K and V; of the top-k experts in a MoE layer."""
    widths: dict[str, int] = {"mixer": 0, "ffn": 0, "experts": 0}
    seen: set[str] = set()
    for rule in rules:
        if (
            rule.role is not Role.MATRIX
            or rule.part is not ModelPart.MAIN
            or rule.ours in seen
            or rule.axes[0].name is AxisName.HIDDEN
        ):
            continue
        seen.add(rule.ours)
        out = local_shape(rule, placement, tp_index)[0]
        kind = "experts" if rule.num_experts else "mixer" if ".mixer." in rule.ours else "ffn"
        widths[kind] += out * max(rule.num_active, 1)
    experts = spec.experts
    chosen = experts.num_active * spec.hidden_size if experts else 0
    return max(widths["mixer"], widths["ffn"], widths["experts"] + chosen)


class ModelShards:
    """Shards of one model, cached by tp and ep: pp and dp do not change them."""

    def __init__(self, spec: ModelSpec, rules: tuple[Rule, ...]) -> None:
        self.spec, self.rules = spec, rules
        self._shards: dict[tuple[object, ...], TpShard] = {}
        self._placements: dict[tuple[object, ...], Placement] = {}
        self._caches: dict[tuple[object, ...], float] = {}
        self._scores: dict[tuple[Interval, float], float] = {}
        self._routed = _running(isinstance(layer.feed_forward, MoE) for layer in spec.layers)

    def placement(self, layout: Layout, scheme: Scheme, shares: tuple[float, ...] = ()) -> Placement:
        key = (layout.tp, layout.ep, scheme, shares)
        if key not in self._placements:
            one_stage = Layout(tp=layout.tp, ep=layout.ep, dp=max(layout.ep // layout.tp, 1))
            self._placements[key] = place(self.rules, self.spec.num_layers, one_stage, scheme, shares=shares or None)
        return self._placements[key]

    def shard(self, layout: Layout, scheme: Scheme, tp_index: int = 0, shares: tuple[float, ...] = ()) -> TpShard:
        key = (layout.tp, layout.ep, scheme, shares, tp_index)
        if key not in self._shards:
            placement = self.placement(layout, scheme, shares)
            self._shards[key] = make_shard(self.spec, self.rules, placement, layout, scheme, tp_index)
        return self._shards[key]

    def cache_bytes(self, layers: Interval, tokens: int, scheme: Scheme, windowed: bool) -> float:
        """KV cache of one sequence over some layers, before tp."""
        key = (layers, tokens, scheme.kv, windowed)
        if key not in self._caches:
            self._caches[key] = sum(
                layer_cache_bytes(layer.mixer, tokens, scheme.kv_element_bytes, windowed, scheme.kv_vector_bytes)
                for layer in self.spec.layers[layers[0] : layers[1]]
            )
        return self._caches[key]

    def score_flops(self, layers: Interval, context: float) -> float:
        """Attention of one token over `context` keys, limited by windows and sparse attention, before tp."""
        key = (layers, context)
        if key not in self._scores:
            known: dict[int, float] = {}
            mixers = [layer.mixer for layer in self.spec.layers[layers[0] : layers[1]]]
            self._scores[key] = sum(known.setdefault(id(mixer), mixer_flops(mixer, context)) for mixer in mixers)
        return self._scores[key]

    def routed_layers(self, layers: Interval) -> float:
        """Layers with routed experts."""
        return self._routed[layers[1]] - self._routed[layers[0]]


@lru_cache(maxsize=2)
def shards_of(spec: ModelSpec, rules: tuple[Rule, ...]) -> ModelShards:
    """Cached across requests: remedies and offers plan the same model many times."""
    return ModelShards(spec, rules)


def touched_share(spec: ModelSpec, batch_tokens: float) -> float:
    """Expected fraction of the experts that a step of this many tokens reads."""
    experts = spec.experts
    return distinct_experts(experts, batch_tokens) / experts.num_experts if experts else 0.0


def busiest_share(spec: ModelSpec, batch_tokens: float, ep: int) -> float:
    """The same for the busiest ep rank, as a fraction of the experts it holds. All ranks wait for it.

    The busiest of ep ranks is taken at mean + sqrt(2 ln ep) standard deviations of a binomial split
    (the usual bound on the expected maximum of ep Gaussians).
    """
    experts, share = spec.experts, touched_share(spec, batch_tokens)
    if experts is None or ep == 1 or share >= 1.0:
        return share
    from math import log, sqrt

    touched, held = share * experts.num_experts, experts.num_experts / ep
    spread = sqrt(touched / ep * (1 - 1 / ep) * (1 - share))
    return min((touched / ep + sqrt(2 * log(ep)) * spread) / held, touched / held, 1.0)
