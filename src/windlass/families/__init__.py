"""One file per family of models: its config's dialects -> ModelSpec, and the names of every tensor. Data and no torch.

A new model made of known parts is one such file with `describe(config, hints)` and `NAMES`, one line below, and a tiny test config.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.errors import BadConfig
from windlass.families.reading.config import Config, format_value
from windlass.families.reading.hints import Hints, hints_from


class Family(Protocol):
    def describe(self, config: Config, hints: Hints) -> ModelSpec: ...
    def rules(self, spec: ModelSpec) -> tuple[Rule, ...]: ...


# model_type in config.json -> the module that knows it.
MODEL_TYPES = {
    "glm4_moe": "moe.glm4_moe",
    "glm4": "dense.glm4",
    "chatglm": "dense.chatglm",
    "llama": "dense.llama",
    "mistral": "dense.llama",
    "qwen3": "dense.qwen3",
    "qwen3_moe": "moe.qwen3_moe",
    "mixtral": "moe.mixtral",
    "falcon": "dense.falcon",
    "RefinedWeb": "dense.falcon",
    "RefinedWebModel": "dense.falcon",
    "bloom": "dense.bloom",
    "gpt2": "dense.gpt2",
    "gpt_bigcode": "dense.gpt_bigcode",
    "gpt_neox": "dense.gpt_neox",
    "deepseek_v3": "moe.deepseek_v3",
    "glm4_moe_lite": "moe.deepseek_v3",
    "glm_moe_dsa": "moe.deepseek_v3",
    "gpt_oss": "moe.gpt_oss",
    "evo2": "dense.evo2",
}


def family(name: str) -> Family:
    return cast(Family, import_module(f"windlass.families.{name}"))


def describe(values: object, name: str = "", *, hints: Hints | None = None, where: str = "config.json") -> ModelSpec:
    """The ModelSpec of a parsed config.json. `hints` say what the checkpoint's files show and the config does not."""
    config = Config(values, where)
    model_type = _model_type(config)
    if model_type not in MODEL_TYPES:
        raise BadConfig(f"{where}: model_type {format_value(model_type)} is not known; known: {', '.join(sorted(MODEL_TYPES))}")
    spec = family(MODEL_TYPES[model_type]).describe(config, hints or Hints())
    config.finish()
    return _as_found(spec, name, hints or Hints())


def _model_type(config: Config) -> str:
    """Named by the config; StripedHyena's has no model_type and is known by its layer lists."""
    value = config.values.get("model_type")
    if value is None and "hcl_layer_idxs" in config.values:
        return "evo2"
    if not isinstance(value, str):
        raise config.refuse(
            "model_type is missing" if value is None else f"model_type should be text, found {format_value(value)}"
        )
    return value


def _as_found(spec: ModelSpec, name: str, hints: Hints) -> ModelSpec:
    """With its name, and with the copy of a tied head that the files hold or do not."""
    import msgspec

    head_copy = spec.head_copy if hints.head_copy is None else spec.tied_head and hints.head_copy
    return msgspec.structs.replace(spec, name=name, head_copy=head_copy)


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every tensor of the model's checkpoint."""
    return family(MODEL_TYPES[spec.family]).rules(spec)


__all__ = ["MODEL_TYPES", "Hints", "describe", "hints_from", "rules"]
