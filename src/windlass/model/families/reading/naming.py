"""Builds the rules of a model from its spec and a table of tensor names.

A family provides a `TensorNames` table; an empty name means that it has no such tensor. `rules_from` walks the layers of the spec
and makes one Rule per tensor, with the fused, stacked and transposed layouts it may be stored in.
"""

from __future__ import annotations

from enum import Enum

from windlass.core.model import Attention, Dense, Frozen, LatentAttention, Layer, LearnedPositions, ModelSpec, MoE, Wiring
from windlass.core.rule import Axis, AxisName, ModelPart, Role, Rule, Source, StridedRows
from windlass.core.scheme import Keep


class FusedOrder(Enum):
    """Row order of a fused QKV projection."""

    CONTIGUOUS = "contiguous"
    """all Q, all K, all V"""
    GROUPED = "grouped"
    """per KV head: its Q heads, then K, then V (with as many KV heads as heads: q, k, v head by head)"""


class TensorNames(Frozen):
    embed: str
    final_norm: str
    head: str
    layer: str
    """Prefix of a layer's tensors, with `{layer}`."""
    head_also: str = ""
    """Alternative name of the head."""
    positions: str = ""
    embed_norm: str = ""
    mixer_norm: str = ""
    ffn_norm: str = ""
    mixer_post_norm: str = ""
    ffn_post_norm: str = ""
    q: str = ""
    k: str = ""
    v: str = ""
    o: str = ""
    qkv: str = ""
    fused_order: FusedOrder = FusedOrder.CONTIGUOUS
    q_norm: str = ""
    k_norm: str = ""
    sinks: str = ""
    q_a: str = ""
    q_a_norm: str = ""
    q_b: str = ""
    kv_a: str = ""
    kv_a_norm: str = ""
    kv_b: str = ""
    indexer: str = ""
    gate: str = ""
    up: str = ""
    down: str = ""
    gate_up: str = ""
    router: str = ""
    stacked_router: str = ""
    """The router's name in checkpoints with stacked experts, where it differs."""
    correction: str = ""
    expert_gate: str = ""
    expert_up: str = ""
    expert_down: str = ""
    stacked_gate_up: str = ""
    stacked_down: str = ""
    stacked_encoding: str = ""
    """Block encoding of the published experts; their unquantized stacked form is then transposed and interleaved."""
    shared: str = ""
    """Prefix of the shared expert's gate, up and down."""
    transposed: bool = False
    """Matrices of the layers are stored [in, out] (GPT-2's Conv1D)."""
    eh_proj: str = ""
    enorm: str = ""
    hnorm: str = ""
    next_norm: str = ""
    next_embed: str = ""
    next_head: str = ""


def _hidden(spec: ModelSpec) -> Axis:
    return Axis(name=AxisName.HIDDEN, count=spec.hidden_size)


def _single(count: int) -> Axis:
    return Axis(name=AxisName.SINGLE, count=count)


def _latent(count: int) -> Axis:
    return Axis(name=AxisName.LATENT, count=count)


class LayerRules:
    """Builds the rules of a group of identical layers. `indices`: the layers; `part`: main model or MTP layer."""

    def __init__(self, spec: ModelSpec, names: TensorNames, layer: Layer, indices: tuple[int, ...], part: ModelPart) -> None:
        self.spec, self.names, self.layer, self.indices, self.part = spec, names, layer, indices, part
        self.made: list[Rule] = []

    def matrix(
        self, ours: str, theirs: str, out: Axis, into: Axis, *, keep: Keep = Keep.QUANTIZE, bias: bool = False, also: str = ""
    ) -> None:
        names = (theirs, also) if also else (theirs,)
        sources = tuple(Source(name=f"{self.names.layer}{name}.weight", transposed=self.names.transposed) for name in names)
        self._add(f"{ours}.weight", (out, into), sources, keep, Role.MATRIX)
        if bias:
            self.vector(f"{ours}.bias", f"{theirs}.bias", out)

    def vector(self, ours: str, theirs: str, axis: Axis, keep: Keep = Keep.HIGH) -> None:
        self._add(ours, (axis,), (Source(name=f"{self.names.layer}{theirs}"),), keep, Role.VECTOR)

    def norm(self, ours: str, theirs: str, axis: Axis, layer_norm: bool | None = None) -> None:
        self.vector(f"{ours}.weight", f"{theirs}.weight", axis)
        if self.spec.norm.kind == "layer" if layer_norm is None else layer_norm:
            self.vector(f"{ours}.bias", f"{theirs}.bias", axis)

    def fused(
        self, ours: tuple[str, ...], theirs: str, outs: tuple[Axis, ...], into: Axis, rows: tuple[StridedRows, ...], bias: bool
    ) -> None:
        """Several of our tensors in one stored tensor, by rows."""
        total = sum(axis.size for axis in outs)
        for name, out, part in zip(ours, outs, rows, strict=True):
            stem = f"{self.names.layer}{theirs}"
            weight = Source(name=f"{stem}.weight", fused_rows=total, rows=part, transposed=self.names.transposed)
            self._add(f"{name}.weight", (out, into), (weight,), Keep.QUANTIZE, Role.MATRIX)
            if bias:
                source = Source(name=f"{stem}.bias", fused_rows=total, rows=part)
                self._add(f"{name}.bias", (out,), (source,), Keep.HIGH, Role.VECTOR)

    def _add(
        self, ours: str, axes: tuple[Axis, ...], sources: tuple[Source, ...], keep: Keep, role: Role, experts: MoE | None = None
    ) -> None:
        self.made.append(
            Rule(
                ours=f"layers.{{layer}}.{ours}",
                axes=axes,
                sources=sources,
                keep=keep,
                role=role,
                layers=self.indices,
                num_experts=experts.num_experts if experts else 0,
                num_active=experts.num_active if experts else 0,
                part=self.part,
            )
        )

    # --- norms, mixers, feed-forwards

    def norms(self) -> None:
        hidden, names = _hidden(self.spec), self.names
        self.norm("mixer_norm", names.mixer_norm, hidden)
        if self.layer.wiring is not Wiring.PARALLEL_ONE_NORM:
            self.norm("ffn_norm", names.ffn_norm, hidden)
        if self.layer.wiring is Wiring.SANDWICH:
            self.norm("mixer_post_norm", names.mixer_post_norm, hidden)
            self.norm("ffn_post_norm", names.ffn_post_norm, hidden)

    def attention(self, mixer: Attention) -> None:
        hidden, names = _hidden(self.spec), self.names
        heads = Axis(name=AxisName.HEADS, count=mixer.num_heads, unit=mixer.head_dim)
        kv = Axis(name=AxisName.KV_HEADS, count=mixer.num_kv_heads, unit=mixer.head_dim)
        if names.qkv:
            rows = _qkv_rows(mixer, names.fused_order)
            self.fused(("mixer.q", "mixer.k", "mixer.v"), names.qkv, (heads, kv, kv), hidden, rows, mixer.qkv_bias)
        else:
            for ours, theirs, axis in (("q", names.q, heads), ("k", names.k, kv), ("v", names.v, kv)):
                self.matrix(f"mixer.{ours}", theirs, axis, hidden, bias=mixer.qkv_bias)
        self.matrix("mixer.o", names.o, hidden, heads, bias=mixer.out_bias)
        if mixer.qk_norm:
            self.norm("mixer.q_norm", names.q_norm, _single(mixer.head_dim))
            self.norm("mixer.k_norm", names.k_norm, _single(mixer.head_dim))
        if mixer.sinks:
            self.vector("mixer.sinks", names.sinks, Axis(name=AxisName.HEADS, count=mixer.num_heads))

    def latent_attention(self, mixer: LatentAttention) -> None:
        hidden, names = _hidden(self.spec), self.names
        queries = Axis(name=AxisName.HEADS, count=mixer.num_heads, unit=mixer.nope_head_dim + mixer.rope_head_dim)
        if mixer.q_lora_rank is None:
            self.matrix("mixer.q", names.q, queries, hidden)
        else:
            self.matrix("mixer.q_a", names.q_a, _latent(mixer.q_lora_rank), hidden)
            self.norm("mixer.q_a_norm", names.q_a_norm, _latent(mixer.q_lora_rank))
            self.matrix("mixer.q_b", names.q_b, queries, _latent(mixer.q_lora_rank))
        self.matrix("mixer.kv_a", names.kv_a, _latent(mixer.kv_lora_rank + mixer.rope_head_dim), hidden)
        self.norm("mixer.kv_a_norm", names.kv_a_norm, _latent(mixer.kv_lora_rank))
        keys_values = Axis(name=AxisName.HEADS, count=mixer.num_heads, unit=mixer.nope_head_dim + mixer.v_head_dim)
        self.matrix("mixer.kv_b", names.kv_b, keys_values, _latent(mixer.kv_lora_rank))
        self.matrix("mixer.o", names.o, hidden, Axis(name=AxisName.HEADS, count=mixer.num_heads, unit=mixer.v_head_dim))
        self._indexer(mixer)

    def _indexer(self, mixer: LatentAttention) -> None:
        """The indexer of sparse attention, replicated on every rank, since all must select the same tokens."""
        index, names = mixer.indexer, self.names
        if index is None or not index.own or mixer.q_lora_rank is None:
            return
        hidden = _hidden(self.spec)
        queries = _single(index.num_heads * index.head_dim)
        self.matrix("mixer.indexer.q", f"{names.indexer}.wq_b", queries, _latent(mixer.q_lora_rank), keep=Keep.HIGH)
        self.matrix("mixer.indexer.k", f"{names.indexer}.wk", _single(index.head_dim), hidden, keep=Keep.HIGH)
        self.norm("mixer.indexer.k_norm", f"{names.indexer}.k_norm", _single(index.head_dim), layer_norm=True)
        self.matrix("mixer.indexer.weights", f"{names.indexer}.weights_proj", _single(index.num_heads), hidden, keep=Keep.HIGH)

    def dense(self, ffn: Dense) -> None:
        hidden, names = _hidden(self.spec), self.names
        width = Axis(name=AxisName.FFN, count=ffn.intermediate_size)
        if names.gate_up and ffn.gated:
            rows = _contiguous(width.size, width.size)
            self.fused(("ffn.gate", "ffn.up"), names.gate_up, (width, width), hidden, rows, ffn.bias)
        else:
            if ffn.gated:
                self.matrix("ffn.gate", names.gate, width, hidden, bias=ffn.bias)
            self.matrix("ffn.up", names.up, width, hidden, bias=ffn.bias)
        self.matrix("ffn.down", names.down, hidden, width, bias=ffn.bias)

    def moe(self, ffn: MoE) -> None:
        hidden, names = _hidden(self.spec), self.names
        experts = _single(ffn.num_experts)
        self.matrix("ffn.router", names.router, experts, hidden, keep=Keep.HIGH, bias=ffn.router.bias, also=names.stacked_router)
        if ffn.router.correction_bias:
            self.vector("ffn.router.correction", names.correction, experts, keep=Keep.FLOAT32)
        self._experts(ffn)
        if ffn.shared_intermediate_size:
            width = Axis(name=AxisName.SHARED_FFN, count=ffn.shared_intermediate_size)
            self.matrix("ffn.shared.gate", f"{names.shared}.gate_proj", width, hidden)
            self.matrix("ffn.shared.up", f"{names.shared}.up_proj", width, hidden)
            self.matrix("ffn.shared.down", f"{names.shared}.down_proj", hidden, width)

    def _experts(self, ffn: MoE) -> None:
        hidden, names = _hidden(self.spec), self.names
        width = Axis(name=AxisName.EXPERT_FFN, count=ffn.intermediate_size)
        size = ffn.intermediate_size
        interleaved = bool(names.stacked_encoding)
        rows = (
            (StridedRows(block=1, stride=2, offset=0), StridedRows(block=1, stride=2, offset=1))
            if interleaved
            else _contiguous(size, size)
        )
        for ours, per_expert, axes, fused in (
            ("gate", names.expert_gate, (width, hidden), rows[0]),
            ("up", names.expert_up, (width, hidden), rows[1]),
            ("down", names.expert_down, (hidden, width), None),
        ):
            stem = names.stacked_gate_up if fused else names.stacked_down
            total = 2 * size if fused else None
            sources = self._expert_sources(per_expert, stem, total, fused)
            self._add(f"ffn.experts.{{expert}}.{ours}.weight", axes, sources, Keep.EXPERT, Role.MATRIX, ffn)
            if ffn.bias:
                bias = Source(name=f"{names.layer}{stem}_bias", fused_rows=total, rows=fused, stacked=True)
                self._add(f"ffn.experts.{{expert}}.{ours}.bias", axes[:1], (bias,), Keep.HIGH, Role.VECTOR, ffn)

    def _expert_sources(self, per_expert: str, stem: str, total: int | None, rows: StridedRows | None) -> tuple[Source, ...]:
        names = self.names
        found: list[Source] = []
        if names.stacked_encoding:
            encoded = Source(
                name=f"{names.layer}{stem}", fused_rows=total, rows=rows, stacked=True, encoding=names.stacked_encoding
            )
            found.append(encoded)
        if per_expert:
            found.append(Source(name=f"{names.layer}{per_expert}.weight"))
        if stem:
            plain = Source(
                name=f"{names.layer}{stem}", fused_rows=total, rows=rows, stacked=True, transposed=bool(names.stacked_encoding)
            )
            found.append(plain)
        return tuple(found)

    def all(self) -> list[Rule]:
        self.norms()
        mixer, ffn = self.layer.mixer, self.layer.feed_forward
        if isinstance(mixer, Attention):
            self.attention(mixer)
        elif isinstance(mixer, LatentAttention):
            self.latent_attention(mixer)
        if isinstance(ffn, Dense):
            self.dense(ffn)
        else:
            self.moe(ffn)
        return self.made


def _contiguous(*sizes: int) -> tuple[StridedRows, ...]:
    total = sum(sizes)
    return tuple(StridedRows(block=size, stride=total, offset=sum(sizes[:index])) for index, size in enumerate(sizes))


def _qkv_rows(mixer: Attention, order: FusedOrder) -> tuple[StridedRows, ...]:
    heads, kv, dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    if order is FusedOrder.CONTIGUOUS:
        return _contiguous(heads * dim, kv * dim, kv * dim)
    group = heads // kv
    stride = (group + 2) * dim
    return (
        StridedRows(block=group * dim, stride=stride, offset=0),
        StridedRows(block=dim, stride=stride, offset=group * dim),
        StridedRows(block=dim, stride=stride, offset=(group + 1) * dim),
    )


def layer_groups(spec: ModelSpec) -> list[tuple[Layer, tuple[int, ...]]]:
    """Groups identical layers, in order of first appearance, so that a model has two or three groups."""
    groups: dict[Layer, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        groups.setdefault(layer, []).append(index)
    return [(layer, tuple(indices)) for layer, indices in groups.items()]


def rules_from(spec: ModelSpec, names: TensorNames) -> tuple[Rule, ...]:
    made = _model_rules(spec, names)
    for layer, indices in layer_groups(spec):
        made += LayerRules(spec, names, layer, indices, ModelPart.MAIN).all()
    if spec.next_token is not None:
        made += _next_token_rules(spec, names)
    return tuple(made)


def _model_rules(spec: ModelSpec, names: TensorNames) -> list[Rule]:
    hidden = _hidden(spec)
    vocab = Axis(name=AxisName.VOCAB, count=spec.vocab_size)
    made = [model_rule("embed.weight", names.embed, (vocab, hidden), Role.LOOKUP)]
    if isinstance(spec.positions, LearnedPositions):
        made.append(model_rule("positions.weight", names.positions, (_single(spec.positions.max_positions), hidden), Role.LOOKUP))
    made += _model_norm(spec, "norm", names.final_norm) if spec.final_norm else []
    made += _model_norm(spec, "embed_norm", names.embed_norm) if spec.embedding_norm else []
    copy_of = "embed.weight" if spec.tied_head else None
    if copy_of is None or spec.head_copy:
        made.append(model_rule("head.weight", names.head, (vocab, hidden), Role.HEAD, copy_of, names.head_also))
    return made


def model_rule(ours: str, theirs: str, axes: tuple[Axis, ...], role: Role, copy_of: str | None = None, also: str = "") -> Rule:
    sources = tuple(Source(name=name) for name in (theirs, also) if name)
    return Rule(ours=ours, axes=axes, sources=sources, keep=Keep.HIGH, role=role, copy_of=copy_of)


def _model_norm(spec: ModelSpec, ours: str, theirs: str) -> list[Rule]:
    parts = ("weight", "bias") if spec.norm.kind == "layer" else ("weight",)
    return [model_rule(f"{ours}.{part}", f"{theirs}.{part}", (_hidden(spec),), Role.VECTOR) for part in parts]


def _next_token_rules(spec: ModelSpec, names: TensorNames) -> list[Rule]:
    """The MTP layer at index num_layers: a full layer, and the projection and norms in front of it."""
    assert spec.next_token is not None
    made = LayerRules(spec, names, spec.next_token.layer, (spec.num_layers,), ModelPart.NEXT_TOKEN)
    hidden, vocab = _hidden(spec), Axis(name=AxisName.VOCAB, count=spec.vocab_size)
    made.matrix("next.project", names.eh_proj, hidden, Axis(name=AxisName.HIDDEN, count=2 * spec.hidden_size))
    for ours, theirs in (("next.embed_norm", names.enorm), ("next.hidden_norm", names.hnorm), ("next.norm", names.next_norm)):
        made.norm(ours, theirs, hidden)
    rules = made.all()
    if spec.next_token.own_embeddings:
        for ours, theirs, role, copy in (
            ("next.embed.weight", names.next_embed, Role.LOOKUP, "embed.weight"),
            ("next.head.weight", names.next_head, Role.HEAD, "head.weight"),
        ):
            rules.append(
                Rule(
                    ours=f"layers.{{layer}}.{ours}",
                    axes=(vocab, hidden),
                    sources=(Source(name=f"{names.layer}{theirs}"),),
                    keep=Keep.HIGH,
                    role=role,
                    layers=(spec.num_layers,),
                    part=ModelPart.NEXT_TOKEN,
                    copy_of=copy,
                )
            )
    return rules
