"""Rotary embeddings from their various config keys: rope_theta, rotary_emb_base, rope_scaling, rope_parameters, rotary_pct."""

from __future__ import annotations

from windlass.core.model import BandScaling, LinearScaling, Rope, YarnScaling
from windlass.model.families.reading.config import MAX_CONTEXT, Config


def read_rope(
    config: Config,
    head_dim: int,
    *,
    interleaved: bool = False,
    partial: float = 1.0,
    theta_factor: float = 1.0,
    layer_context: int = MAX_CONTEXT,
) -> Rope:
    """`partial`: the family's default for the rotated fraction of a head."""
    parameters = config.section("rope_parameters")
    legacy = config.section("rope_scaling")
    source = parameters or legacy
    theta = config.number("rope_theta", "rotary_emb_base", default=10000.0, low=1.0)
    fraction = config.number("partial_rotary_factor", "rotary_pct", default=partial, high=1.0)
    if parameters is not None:
        theta = parameters.number("rope_theta", default=theta, low=1.0)
        fraction = parameters.number("partial_rotary_factor", default=fraction, high=1.0)
        if legacy is not None:
            raise config.refuse("rope_parameters and rope_scaling are both given; remove one")
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise config.refuse(f"{rotary_dim} rotated dimensions of a head of {head_dim}; it must be even and at least 2")
    scaling = _read_scaling(source, layer_context) if source is not None else None
    return Rope(theta=theta * theta_factor, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling)


def _read_scaling(section: Config, context: int) -> LinearScaling | BandScaling | YarnScaling | None:
    kind = section.choice(
        "rope_type", "type", among={name: name for name in ("default", "linear", "llama3", "yarn")}, default="default"
    )
    scaling = None
    if kind == "linear":
        scaling = LinearScaling(factor=section.number("factor", low=1e-3, high=1e6))
    elif kind == "llama3":
        scaling = BandScaling(
            factor=section.number("factor", low=1e-3, high=1e6),
            low_freq_factor=section.number("low_freq_factor"),
            high_freq_factor=section.number("high_freq_factor"),
            original_context_tokens=section.integer("original_max_position_embeddings", high=MAX_CONTEXT),
        )
    elif kind == "yarn":
        scaling = _read_yarn(section, context)
    section.finish()
    return scaling


def _read_yarn(section: Config, context: int) -> YarnScaling:
    has_factor = section.values.get("attention_factor") is not None
    return YarnScaling(
        factor=section.number("factor", low=1e-3, high=1e6),
        original_context_tokens=section.integer("original_max_position_embeddings", default=context, high=MAX_CONTEXT),
        beta_fast=section.number("beta_fast", default=32.0),
        beta_slow=section.number("beta_slow", default=1.0),
        mscale=section.number("mscale", default=1.0),
        mscale_all_dim=section.number("mscale_all_dim", default=0.0),
        attention_factor=section.number("attention_factor") if has_factor else None,
        truncate=section.flag("truncate", default=True),
    )
