"""`quantization_config` of config.json, as compressed-tensors readers (vLLM, transformers, Windlass) expect it. Pure."""

from __future__ import annotations

import re
from typing import Any

from windlass.core.rule import Role
from windlass.core.scheme import Scheme
from windlass.tasks.convert.outputs import ConvertedTensor

ANY_NUMBER = "\0"
"""Placeholder for a number in a module pattern; occurs in no name."""


def quantization_config(made: tuple[ConvertedTensor, ...], scheme: Scheme) -> dict[str, Any] | None:
    """None where nothing is quantized. Matrices that use a smaller group size get a config group of their own."""
    packed = [output for output in made if output.packed]
    if not packed:
        return None
    groups: dict[str, Any] = {}
    usual = scheme.group
    groups["group_0"] = {"targets": ["Linear"], "weights": _weights(scheme, usual)}
    for group in sorted(
        {output.stored.group for output in packed if output.stored.group != usual and output.stored.group}, reverse=True
    ):
        names = [output.module for output in packed if output.stored.group == group]
        others = [output.module for output in packed if output.stored.group != group]
        groups[f"group_{len(groups)}"] = {"targets": patterns(names, others), "weights": _weights(scheme, group)}
    for described in groups.values():
        described.update(input_activations=None, output_activations=None)
    kept = [output.module for output in made if not output.packed and len(output.shape) == 2 and output.name.endswith(".weight")]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if usual is None else "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": sorted({*patterns(kept, [output.module for output in packed]), *_tied_head(made)}),
        "config_groups": groups,
    }


def _tied_head(made: tuple[ConvertedTensor, ...]) -> list[str]:
    """A tied head is a module without weights; without this entry readers would look for its codes."""
    return [] if any(output.rule.role is Role.HEAD for output in made) else ["lm_head"]


def _weights(scheme: Scheme, group: int | None) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "float" if group is None else "int",
        "symmetric": not scheme.zero_points,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "actorder": None,
        "block_structure": None,
    }


def patterns(modules: list[str], others: list[str]) -> list[str]:
    """One regex per kind of module, layers and experts as `\\d+`, unless it would also match one of `others`."""
    taken = {_kind(module) for module in others}
    kinds: dict[str, list[str]] = {}
    for module in modules:
        kinds.setdefault(_kind(module), []).append(module)
    made: list[str] = []
    for kind, members in kinds.items():
        alone = len(members) == 1 or kind in taken
        made += members if alone else ["re:^" + re.escape(kind).replace(re.escape(ANY_NUMBER), r"\d+") + "$"]
    return made


def _kind(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", ANY_NUMBER, module)
