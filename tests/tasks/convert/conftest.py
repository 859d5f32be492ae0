"""Tiny checkpoints of random weights, made straight from a family's rules, so that every family and every layout can be had."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from windlass.core.rule import Rule, Source, stored_shape
from windlass.core.scheme import Keep, Stored
from windlass.model.families import describe, rules

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).parents[2] / "model" / "families" / "tiny"

# Rows long enough for groups: 128 takes every group, 96 only 32, 64 not 128.
WIDER = {
    "hidden_size": 128, "n_embd": 128, "intermediate_size": 96, "ffn_hidden_size": 96, "n_inner": 96, "moe_intermediate_size": 64,
    "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 32, "kv_channels": 32,
    "kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "index_head_dim": 32,
}  # fmt: skip

Key = tuple[str, int | None, int | None]
"""Our name of a tensor, its layer, its expert."""


class Tiny:
    """Models of a few thousand weights. Values are ours, [out, in], by name, layer and expert; `stored` lays them out as a file has them."""

    def config(self, name: str, **changes: Any) -> dict[str, Any]:
        """A family's tiny config with rows that groups divide."""
        values = json.loads((FOLDER / f"{name}.json").read_text())
        found = {key: WIDER[key] if key in WIDER and value is not None else value for key, value in values.items()}
        if "kv_lora_rank" in found:
            found["num_key_value_heads"] = found["num_attention_heads"]
        return {**found, "torch_dtype": "bfloat16", **changes}

    def rules(self, config: Mapping[str, Any]) -> tuple[Rule, ...]:
        return rules(describe(config))

    def values(self, made: tuple[Rule, ...], dtype: str = "bfloat16", seed: int = 0) -> dict[Key, torch.Tensor]:
        import torch

        chance = torch.Generator().manual_seed(seed)
        found: dict[Key, torch.Tensor] = {}
        for rule in made:
            for key in keys(rule):
                value = torch.randn(rule.shape, generator=chance) * 0.05
                if any(source.encoding for source in rule.sources):
                    value = representable(value)
                found[key] = value.float() if rule.keep is Keep.FLOAT32 else value.to(getattr(torch, dtype))
        return found

    def stored(self, made: tuple[Rule, ...], values: Mapping[Key, torch.Tensor], choice: int = 0) -> dict[str, torch.Tensor]:
        """As a checkpoint holds them; `choice` picks the layout where a rule knows several."""
        import torch

        found: dict[str, torch.Tensor] = {}
        encoded: set[str] = set()
        for rule in made:
            source = rule.sources[min(choice, len(rule.sources) - 1)]
            for key in keys(rule):
                name = source.name.format(layer=key[1], expert=key[2])
                if name not in found:
                    found[name] = torch.zeros(stored_shape(rule, source), dtype=values[key].dtype)
                ours_within(rule, source, found[name], key[2], values[key])
                encoded |= {name} if source.encoding else set()
        for name in encoded:
            found[f"{name}_blocks"], found[f"{name}_scales"] = mxfp4_blocks(found.pop(name).float())
        return found

    def write(self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
        """Two files and an index."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        names = sorted(tensors)
        halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, part in halves.items():
            save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map = {name: file for file, part in halves.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    def make(self, folder: Path, name: str = "llama", *, choice: int = 0, dtype: str = "bfloat16", **changes: Any) -> Path:
        """All of it: a directory of that family."""
        config = self.config(name, **{"torch_dtype": dtype, **changes})
        made = self.rules(config)
        return self.write(folder, config, self.stored(made, self.values(made, dtype), choice))

    def read(self, folder: Path) -> Converted:
        return Converted(folder)


def keys(rule: Rule) -> list[Key]:
    layers = rule.layers if rule.layers is not None else (None,)
    experts = range(rule.num_experts) if rule.num_experts else (None,)
    return [(rule.ours, layer, expert) for layer in layers for expert in experts]


def ours_within(rule: Rule, source: Source, tensor: torch.Tensor, expert: int | None, value: torch.Tensor) -> None:
    """Writes our rows where the layout has them."""
    place = tensor[expert] if source.stacked else tensor
    place = place.t() if source.transposed else place
    rows = range(rule.shape[0])
    place[[source.rows.stored(row) for row in rows] if source.rows else list(rows)] = value


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def representable(value: torch.Tensor) -> torch.Tensor:
    """The nearest values that MXFP4 can tell apart, with a 6 in every block so that its exponent can be seen; some exponents differ."""
    import torch

    blocks = value.view(*value.shape[:-1], -1, 32)
    scale = 2.0 ** torch.randint(-8, -4, blocks.shape[:-1], generator=torch.Generator().manual_seed(1)).unsqueeze(-1)
    table = torch.tensor((*FP4, *(-one for one in FP4)))
    codes = ((blocks / scale).unsqueeze(-1) - table).abs().argmin(dim=-1)
    found = table[codes]
    found[..., 0] = 6.0
    return (found * scale).view_as(value)


def mxfp4_blocks(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    blocks = value.view(*value.shape[:-1], -1, 32)
    exponent = (blocks.abs().amax(dim=-1) / 6).log2().round()
    ratio = blocks / 2.0 ** exponent.unsqueeze(-1)
    codes = (ratio.abs().unsqueeze(-1) - torch.tensor(FP4)).abs().argmin(dim=-1) + 8 * (ratio < 0)
    pairs = codes.to(torch.uint8).view(*codes.shape[:-1], 16, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), (exponent + 127).to(torch.uint8)


class Converted:
    """A new directory, read with safetensors' own reader."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file

        self.tensors: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            self.tensors |= load_file(file)
        self.config = json.loads((folder / "config.json").read_text())
        self.used: set[str] = set()

    def ignored(self, module: str) -> bool:
        return any(names(entry, module) for entry in self.config["quantization_config"]["ignore"])

    def group(self, module: str) -> int | None:
        """As compressed-tensors reads the config: names before classes."""
        groups = list(self.config["quantization_config"]["config_groups"].values())
        named = [one for one in groups if any(names(target, module) for target in one["targets"])]
        (found,) = named or [one for one in groups if "Linear" in one["targets"]]
        return found["weights"]["group_size"]

    def stored(self, module: str) -> Stored | None:
        """How a matrix is packed, told from its tensors; None: it is not."""
        scale = self.tensors.get(f"{module}.weight_scale")
        if scale is None:
            return None
        if f"{module}.weight_packed" not in self.tensors:
            return Stored(bits=8, scale_bytes=4)
        words, shape = self.tensors[f"{module}.weight_packed"], self.tensors[f"{module}.weight_shape"].tolist()
        bits, group = words.shape[1] * 32 // shape[1], shape[1] // scale.shape[1]
        return Stored(bits=bits, group=group, scale_bytes=2, zero_points=f"{module}.weight_zero_point" in self.tensors)

    def matrix(self, name: str) -> tuple[torch.Tensor, Stored | None]:
        """Unpacked, with how it was packed."""
        from windlass.runtime.quant import from_tensors

        module = name.removesuffix(".weight")
        how = self.stored(module)
        if how is None:
            self.used.add(name)
            return self.tensors[name], None
        parts = {key: value for key, value in self.tensors.items() if key.startswith(f"{module}.weight")}
        self.used |= parts.keys()
        return from_tensors({key.removeprefix(f"{module}."): value for key, value in parts.items()}, how).dequantize(), how


def names(target: str, module: str) -> bool:
    return bool(re.match(target.removeprefix("re:"), module)) if target.startswith("re:") else target == module


@pytest.fixture(autouse=True, scope="module")
def no_disk_is_waited_for() -> Iterator[None]:
    """What was written is there without: only a power cut could tell. It is most of the time that small conversions take."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda _: None)
        yield


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    return Tiny()
