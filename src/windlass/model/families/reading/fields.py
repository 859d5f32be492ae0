"""Config fields that several families share: attention, norms, context, stop tokens, quantization."""

from __future__ import annotations

from windlass.core.model import Activation, Attention, Norm
from windlass.model.families.reading.config import MAX_CONTEXT, MAX_EXPERTS, MAX_LAYERS, Config, format_value

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

# quantization_config.quant_method of published checkpoints -> the scheme their matrices are in.
_NATIVE = {"fp8": "fp8", "mxfp4": "mxfp4"}
_PACKED = ("compressed-tensors", "awq", "gptq")
"""Integers in groups; bits and group are in the section."""


def read_layers(config: Config, *names: str) -> int:
    return config.integer(*(names or ("num_hidden_layers",)), high=MAX_LAYERS)


def read_experts(config: Config, *names: str) -> int:
    return config.integer(*names, high=MAX_EXPERTS)


def read_active(config: Config, num_experts: int, *names: str) -> int:
    return config.integer(*names, high=num_experts)


def read_context(config: Config, *names: str, default: int | None = None) -> int:
    return config.integer(*(names or ("max_position_embeddings",)), default=default, high=MAX_CONTEXT)


def read_rms(config: Config) -> Norm:
    return Norm(kind="rms", eps=config.number("rms_norm_eps", default=1e-6, high=1.0))


def read_layer_norm(config: Config, *names: str) -> Norm:
    return Norm(kind="layer", eps=config.number(*names, default=1e-5, high=1.0))


def read_attention(
    config: Config,
    hidden_size: int,
    *,
    heads: tuple[str, ...] = ("num_attention_heads",),
    kv_heads: tuple[str, ...] = ("num_key_value_heads",),
    default_kv_heads: int | None = None,
    head_dim: tuple[str, ...] = ("head_dim",),
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
    sinks: bool = False,
) -> Attention:
    num_heads = config.integer(*heads)
    num_kv_heads = config.integer(*kv_heads, default=default_kv_heads or num_heads, high=num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse(f"{heads[0]} {num_heads} is not a multiple of {kv_heads[0]} {num_kv_heads}")
    dim = config.optional_integer(*head_dim, high=65536)
    if dim is None:
        if hidden_size % num_heads:
            raise config.refuse(
                f"hidden size {hidden_size} is not a multiple of {heads[0]} {num_heads}, and {head_dim[0]} is missing"
            )
        dim = hidden_size // num_heads
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        window=window,
        sinks=sinks,
    )


def read_stops(config: Config) -> tuple[int, ...]:
    return config.integers("eos_token_id")


def read_native_scheme(config: Config) -> str:
    """Scheme of the checkpoint. Unsupported quantization methods are refused."""
    section = config.section("quantization_config")
    if section is None:
        return "bf16"
    method = section.values.get("quant_method")
    if method in _PACKED:
        return "compressed-tensors"
    if not isinstance(method, str) or method not in _NATIVE:
        raise section.refuse(
            f"quant_method {format_value(method)} is not supported; supported: {', '.join([*_NATIVE, *_PACKED])}"
        )
    return _NATIVE[method]


def read_dropout(config: Config) -> bool:
    """Whether the model trains with dropout, whose masks take memory."""
    keys = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout")
    return any(isinstance(config.values.get(key), (int, float)) and config.values[key] > 0 for key in keys)
