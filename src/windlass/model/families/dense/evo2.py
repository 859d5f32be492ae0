"""Evo 2 (StripedHyena 2): gated convolutions with attention in a few layers. For memory planning only; Windlass does not
run it. Names are those of the vortex code."""

from __future__ import annotations

from windlass.core.model import Activation, Attention, Convolution, Dense, Layer, ModelSpec, Norm
from windlass.core.rule import Axis, AxisName, Role, Rule, Source
from windlass.core.scheme import Keep
from windlass.model.families.reading.config import MAX_CONTEXT, Config
from windlass.model.families.reading.fields import read_attention, read_layers
from windlass.model.families.reading.hints import Hints
from windlass.model.families.reading.naming import layer_groups, model_rule
from windlass.model.families.reading.rope import LinearScaling, Rope


def describe(config: Config, hints: Hints) -> ModelSpec:
    hidden, num_layers = config.integer("hidden_size"), read_layers(config, "num_layers")
    kinds = _layer_kinds(config, num_layers)
    attention = read_attention(
        config, hidden, kv_heads=("num_key_value_heads",), out_bias=config.flag("mha_out_proj_bias", default=True)
    )
    mixers = _mixers(config, hidden, attention)
    ffn = Dense(intermediate_size=config.integer("inner_mlp_size"), gated=True, activation=Activation.GELU)
    scaling = LinearScaling(factor=config.number("rotary_emb_scaling_factor", default=1.0, low=1e-3, high=1e6))
    theta = config.number("rotary_emb_base", default=10000.0, low=1.0)
    config.ignore(*(key for key in config.values))  # runtime options of its own engine; shapes are read above
    return ModelSpec(
        name="",
        family="evo2",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=config.integer("max_seqlen", high=MAX_CONTEXT),
        layers=tuple(Layer(mixer=mixers[kind], feed_forward=ffn) for kind in kinds),
        norm=Norm(kind="rms", eps=config.number("eps", default=1e-6, high=1.0)),
        positions=Rope(theta=theta, rotary_dim=attention.head_dim, scaling=scaling),
        tied_head=config.flag("tie_embeddings", default=True),
        engines=(),
    )


def _layer_kinds(config: Config, num_layers: int) -> list[str]:
    kinds: dict[int, str] = {}
    for kind in ("attn", "hcl", "hcm", "hcs"):
        for index in config.integers(f"{kind}_layer_idxs", high=num_layers - 1):
            kinds[index] = kind
    if len(kinds) != num_layers:
        raise config.refuse(f"attn, hcl, hcm and hcs layer_idxs name {len(kinds)} of {num_layers} layers")
    if "attn" not in kinds.values():
        raise config.refuse("attn_layer_idxs is empty; at least one attention layer is expected")
    return [kinds[index] for index in range(num_layers)]


def _mixers(config: Config, hidden: int, attention: Attention) -> dict[str, Attention | Convolution]:
    """Filter parameters: hcl has `state_size` poles and residues a channel, hcm and hcs explicit taps a group; all a skip term."""
    state = config.integer("state_size", high=65536)
    short = config.integer("short_filter_length", high=65536)
    taps = {
        kind: config.integer(f"{kind}_filter_length", high=2**20) * config.integer(f"{kind}_filter_groups")
        for kind in ("hcm", "hcs")
    }
    projection_filter = 3 * hidden * short
    return {
        "attn": attention,
        "hcl": Convolution(
            filter_elements=projection_filter + hidden * (2 * state + 1), state_elements=hidden * (state + 3 * short)
        ),
        "hcm": Convolution(
            filter_elements=projection_filter + taps["hcm"] + hidden,
            state_elements=hidden * (config.integer("hcm_filter_length", high=2**20) + 3 * short),
        ),
        "hcs": Convolution(
            filter_elements=projection_filter + taps["hcs"] + hidden,
            state_elements=hidden * (config.integer("hcs_filter_length", high=2**20) + 3 * short),
        ),
    }


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    hidden = Axis(name=AxisName.HIDDEN, count=spec.hidden_size)
    vocab = Axis(name=AxisName.VOCAB, count=spec.vocab_size)
    made = [
        model_rule("embed.weight", "embedding_layer.weight", (vocab, hidden), Role.LOOKUP),
        model_rule("norm.weight", "norm.scale", (hidden,), Role.VECTOR),
    ]
    for layer, indices in layer_groups(spec):
        made += [_layer_rule(*row, indices) for row in _layer_rows(layer, hidden)]
    return tuple(made)


def _layer_rows(layer: Layer, hidden: Axis) -> list[tuple[str, str, tuple[Axis, ...]]]:
    assert isinstance(layer.feed_forward, Dense)
    width = Axis(name=AxisName.FFN, count=layer.feed_forward.intermediate_size)
    thrice = Axis(name=AxisName.SINGLE, count=3 * hidden.count)
    rows: list[tuple[str, str, tuple[Axis, ...]]] = [
        ("mixer_norm.weight", "pre_norm.scale", (hidden,)),
        ("ffn_norm.weight", "post_norm.scale", (hidden,)),
        ("ffn.gate.weight", "mlp.l1.weight", (width, hidden)),
        ("ffn.up.weight", "mlp.l2.weight", (width, hidden)),
        ("ffn.down.weight", "mlp.l3.weight", (hidden, width)),
    ]
    if isinstance(layer.mixer, Convolution):
        rows += [
            ("mixer.in.weight", "projections.weight", (thrice, hidden)),
            ("mixer.filter", "filter", (Axis(name=AxisName.SINGLE, count=layer.mixer.filter_elements),)),
            ("mixer.o.weight", "out_filter_dense.weight", (hidden, hidden)),
            ("mixer.o.bias", "out_filter_dense.bias", (hidden,)),
        ]
    else:
        rows += [
            ("mixer.qkv.weight", "inner_mha_cls.Wqkv.weight", (thrice, hidden)),
            ("mixer.o.weight", "inner_mha_cls.out_proj.weight", (hidden, hidden)),
            ("mixer.o.bias", "inner_mha_cls.out_proj.bias", (hidden,)),
        ]
    return rows


def _layer_rule(ours: str, theirs: str, axes: tuple[Axis, ...], indices: tuple[int, ...]) -> Rule:
    matrix = len(axes) == 2
    return Rule(
        ours=f"layers.{{layer}}.{ours}",
        axes=axes,
        sources=(Source(name=f"blocks.{{layer}}.{theirs}"),),
        keep=Keep.QUANTIZE if matrix else Keep.HIGH,
        role=Role.MATRIX if matrix else Role.VECTOR,
        layers=indices,
    )
