"""A tiny model as `windlass convert` leaves it on disk: what ranks of their own processes, and packed weights, are tested with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from split_models import Model, model_of

from windlass.core.scheme import Scheme
from windlass.tasks.convert.convert import ConvertSettings, convert

# Inputs in whole groups of 32, also of each of three ranks.
WIDER = {
    "hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 96, "head_dim": 32, "num_attention_heads": 6,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "torch_dtype": "bfloat16",
}  # fmt: skip


def converted(config: dict[str, Any], folder: Path, how: Scheme) -> tuple[Path, Model]:
    wider = config | {key: value for key, value in WIDER.items() if key in config or key == "torch_dtype"}
    model = model_of(wider)
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(wider))
    save_file({name: value.to(torch.bfloat16) for name, value in model.state.items()}, source / "model.safetensors")
    convert(source, folder / "converted", ConvertSettings(scheme=how, jobs=1))
    return folder / "converted", model
