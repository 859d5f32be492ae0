"""Model families: config.json -> ModelSpec, and the names of every tensor in its checkpoint. Data; no torch.

To add a model made of known layers (copy `dense/qwen3.py` or `moe/mixtral.py`, about 70 lines):

1. One file in `dense/` or `moe/`, named like the `model_type`, with `NAMES` (the checkpoint's tensor names),
   `describe(config, hints) -> ModelSpec` (reads every key; unread keys are refused) and
   `rules(spec) -> tuple[Rule, ...]`, usually `rules_from(spec, NAMES)`.
2. One row in MODEL_TYPES below: `model_type` of config.json -> that file.
3. A tiny config, `tests/model/families/tiny/MODEL_TYPE.json`: tests of every family (loading, splitting, conversion, comparison with
   transformers) pick it up by its name.

A new kind of attention or feed-forward is a struct in `core/model.py` and a module in `nn` first. Optional: a row in
`registry.toml` (a name for `windlass plan NAME`), `chat/dialects.toml` (tool calls, reasoning).
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.errors import BadConfig
from windlass.model.families.reading.config import Config, format_value
from windlass.model.families.reading.hints import Hints, hints_from


class Family(Protocol):
    def describe(self, config: Config, hints: Hints) -> ModelSpec: ...
    def rules(self, spec: ModelSpec) -> tuple[Rule, ...]: ...


# model_type in config.json -> module in this package.
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


# model_type of models whose layers and tensor names are another's, as their publishers say.
SAME_AS = {"kimi_k2": "deepseek_v3"}


def family(name: str) -> Family:
    return cast(Family, import_module(f"windlass.model.families.{name}"))


def describe(values: object, name: str = "", *, hints: Hints | None = None, where: str = "config.json") -> ModelSpec:
    """The ModelSpec of a parsed config.json. `hints`: what the checkpoint's tensor names show and the config does not say."""
    config = Config(_under_its_family(values), where)
    model_type = _model_type(config)
    if model_type not in MODEL_TYPES:
        raise BadConfig(
            f"{where}: model_type {format_value(model_type)} is not supported; supported: {', '.join(sorted(MODEL_TYPES))}"
        )
    spec = family(MODEL_TYPES[model_type]).describe(config, hints or Hints())
    config.finish()
    return _with_hints(spec, name, hints or Hints())


def _under_its_family(values: object) -> object:
    """The config with the model_type of its twin, if it has one."""
    if not isinstance(values, dict):
        return values
    table = cast("dict[str, object]", values)
    given = table.get("model_type")
    return {**table, "model_type": SAME_AS[given]} if isinstance(given, str) and given in SAME_AS else table


def _model_type(config: Config) -> str:
    """From the config; StripedHyena has no model_type and is recognised by its layer lists."""
    value = config.values.get("model_type")
    if value is None and "hcl_layer_idxs" in config.values:
        return "evo2"
    if not isinstance(value, str):
        raise config.refuse(
            "model_type is missing" if value is None else f"model_type should be a string, found {format_value(value)}"
        )
    return value


def _with_hints(spec: ModelSpec, name: str, hints: Hints) -> ModelSpec:
    """With its name, and whether the files store a copy of the tied head."""
    import msgspec

    head_copy = spec.head_copy if hints.head_copy is None else spec.tied_head and hints.head_copy
    return msgspec.structs.replace(spec, name=name, head_copy=head_copy)


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Rules for every tensor of the model's checkpoint."""
    return family(MODEL_TYPES[spec.family]).rules(spec)


__all__ = ["MODEL_TYPES", "Hints", "describe", "hints_from", "rules"]
