"""Saves adapters in PEFT format: adapter_model.safetensors and adapter_config.json, under published names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from windlass.core.recipe.sections import LoraSection
from windlass.core.rule import Rule
from windlass.errors import Impossible
from windlass.model.formats.disk.atomic import write_atomically
from windlass.runtime.weights.tensors.tensor_index import TensorIndex

PREFIX = "base_model.model."
LETTERS = {"lora_a": "lora_A", "lora_b": "lora_B"}


def save_adapter(tensors: Mapping[str, Tensor], rules: tuple[Rule, ...], section: LoraSection, base: str, out: Path) -> list[str]:
    """`tensors`: the `model` part of a trainer's state, by our names (`layers.0.mixer.q.lora_a.weight`). Returns the names written."""
    from safetensors.torch import save

    named = TensorIndex(rules)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for published, values in _published(named, name, tensor):
            found[PREFIX + published] = values.detach().to("cpu", torch.float32).contiguous()
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "adapter_model.safetensors", save(found, metadata={"format": "pt"}))
    write_atomically(
        out / "adapter_config.json", msgspec.json.format(msgspec.json.encode(_config(section, base, found)), indent=2) + b"\n"
    )
    return sorted(found)


def _published(named: TensorIndex, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensor under its published name; experts one by one."""
    matrix, letter, _ = name.rsplit(".", 2)
    if ".experts." not in matrix:
        return [(f"{_module(named, matrix)}.{LETTERS[letter]}.weight", tensor)]
    stem, _, part = matrix.rpartition(".")
    return [
        (f"{_module(named, f'{stem}.{expert}.{part}')}.{LETTERS[letter]}.weight", values) for expert, values in enumerate(tensor)
    ]


def _module(named: TensorIndex, matrix: str) -> str:
    ours = named.get(f"{matrix}.weight")
    plain = [source for source in ours.rule.sources if source.fused_rows is None and not source.transposed and not source.stacked]
    if not plain:
        raise Impossible(
            f"{matrix} is published only as part of a fused tensor, which PEFT adapters cannot address; choose other lora.targets"
        )
    return plain[0].name.format(layer=ours.layer, expert=ours.expert).removesuffix(".weight")


def _config(section: LoraSection, base: str, found: Mapping[str, Tensor]) -> dict[str, Any]:
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in found})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
