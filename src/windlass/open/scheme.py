"""How the matrices of a model directory are stored, from its config.json alone."""

from __future__ import annotations

from typing import Any

import msgspec


class _Weights(msgspec.Struct):
    num_bits: int
    type: str = "int"
    group_size: int | None = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None


class _Quantization(msgspec.Struct):
    """The fields of compressed-tensors' section that are needed here."""

    quant_method: str = ""
    config_groups: dict[str, _Group] = {}


def stored_scheme(config: dict[str, Any]) -> tuple[str, int | None]:
    """int4, int8, fp8, mxfp4 or bf16 (any plain floats), and the group size."""
    if not config.get("quantization_config"):
        return "bf16", None
    try:
        section = msgspec.convert(config["quantization_config"], _Quantization)
    except msgspec.ValidationError:
        return "unknown", None
    found = next((group.weights for group in section.config_groups.values() if group.weights is not None), None)
    if section.quant_method != "compressed-tensors" or found is None:
        return section.quant_method, None
    kind = "fp" if found.type == "float" else "int"
    return f"{kind}{found.num_bits}", found.group_size if found.group_size and found.group_size > 0 else None
