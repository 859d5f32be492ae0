"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, checked, under our names of the matrices.

Files may come from strangers: nothing is unpickled, shapes are compared with the model's, and whatever would change the model in another
way than W + scale B A is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from windlass.core.rule import ModelPart, Rule
from windlass.errors import BadInput
from windlass.foreign import shown

PREFIX = "base_model.model."
MAX_RANK = 1024
MAX_CONFIG_BYTES = 2**20
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<letter>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """What is added to one matrix: b @ a, the scale included in b."""

    a: Tensor
    """fp32 [rank, in]"""
    b: Tensor
    """fp32 [out, rank]"""


class AdapterConfig(msgspec.Struct):
    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    target_parameters: list[str] | None = None
    layer_replication: Any = None

    @property
    def scale(self) -> float:
        return self.lora_alpha / (sqrt(self.r) if self.use_rslora else self.r)


def read_adapter(folder: Path, rules: tuple[Rule, ...]) -> dict[str, LoraMatrices]:
    """By our names of the matrices, without `.weight`: `layers.0.mixer.q`."""
    config = _config(folder)
    ours = published_matrices(rules)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(folder).items():
        match = _NAME.fullmatch(name.removeprefix(PREFIX))
        if match is None or match["module"] not in ours:
            raise BadInput(f"adapter {folder.name}: {shown(name)} is not a matrix of this model; was it made for another one?")
        pairs.setdefault(match["module"], {})[match["letter"]] = tensor
    if not pairs:
        raise BadInput(f"adapter {folder.name}: adapter_model.safetensors contains no LoRA matrices")
    return {ours[module][0]: _checked(folder, module, pair, ours[module][1], config) for module, pair in pairs.items()}


def published_matrices(rules: tuple[Rule, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Published module name -> our name and [out, in]. Matrices that are published as part of a fused tensor are left out."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rule in rules:
        plain = [one for one in rule.sources if one.fused_rows is None and not one.transposed and not one.stacked]
        if rule.part is not ModelPart.MAIN or rule.layers is None or len(rule.shape) != 2 or not plain:
            continue
        for layer in rule.layers:
            for expert in range(rule.num_experts) if rule.num_experts else (None,):
                names = [text.format(layer=layer, expert=expert).removesuffix(".weight") for text in (plain[0].name, rule.ours)]
                found[names[0]] = names[1], rule.shape
    return found


def matrix_rows(rules: tuple[Rule, ...]) -> dict[str, int]:
    """Rows of every matrix inside the layers, by our name without `.weight`."""
    held = [rule for rule in rules if rule.part is ModelPart.MAIN and rule.layers is not None and len(rule.shape) == 2]
    return {
        rule.ours.format(layer=layer, expert=0).removesuffix(".weight"): rule.shape[0]
        for rule in held
        for layer in rule.layers or ()
    }


def _config(folder: Path) -> AdapterConfig:
    path = folder / "adapter_config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise BadInput(f"adapter {folder.name}: adapter_config.json is larger than 1 MiB")
        config = msgspec.json.decode(path.read_bytes(), type=AdapterConfig)
    except OSError as error:
        raise BadInput(
            f"adapter {folder}: cannot read adapter_config.json: {error.strerror}; give a folder that PEFT wrote"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadInput(f"adapter {folder.name}: adapter_config.json is not a LoRA adapter's") from None
    _check_config(folder, config)
    return config


def _check_config(folder: Path, config: AdapterConfig) -> None:
    others = {
        "use_dora": config.use_dora,
        "fan_in_fan_out": config.fan_in_fan_out,
        "modules_to_save": bool(config.modules_to_save),
        "rank_pattern": bool(config.rank_pattern),
        "alpha_pattern": bool(config.alpha_pattern),
        "target_parameters": bool(config.target_parameters),
        "layer_replication": bool(config.layer_replication),
        f"bias {config.bias[:20]!r}": config.bias != "none",
        f"peft_type {config.peft_type[:20]!r}": config.peft_type != "LORA",
    }
    for what, is_there in others.items():
        if is_there:
            raise BadInput(f"adapter {folder.name}: {what} is not supported; merge it into the model instead")
    if not 1 <= config.r <= MAX_RANK:
        raise BadInput(f"adapter {folder.name}: rank {config.r} is not between 1 and {MAX_RANK:,}")


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise BadInput(f"adapter {folder.name}: there is no adapter_model.safetensors; other formats are not read")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"adapter {folder.name}: cannot read adapter_model.safetensors: {shown(error)}") from None


def _checked(folder: Path, module: str, pair: dict[str, Tensor], shape: tuple[int, ...], config: AdapterConfig) -> LoraMatrices:
    a, b = pair.get("A"), pair.get("B")
    expected = (config.r, shape[1]), (shape[0], config.r)
    if a is None or b is None or (tuple(a.shape), tuple(b.shape)) != expected:
        found = [None if one is None else list(one.shape) for one in (a, b)]
        raise BadInput(
            f"adapter {folder.name}: {module} has A {found[0]} and B {found[1]}; this model needs {list(expected[0])} and {list(expected[1])}"
        )
    a, b = a.float(), b.float() * config.scale
    if not (a.is_floating_point() and torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise BadInput(f"adapter {folder.name}: {module} contains NaN or infinite values")
    return LoraMatrices(a.contiguous(), b.contiguous())
