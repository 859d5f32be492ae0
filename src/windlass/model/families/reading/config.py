"""Reads config.json: aliases, types and bounds are checked, and unread keys are refused.

A key that no family read and that is not known to be harmless is refused by name, since it may change the computation.
"""

from __future__ import annotations

import re
from typing import Any

from windlass.errors import BadConfig
from windlass.foreign import MAX_MESSAGE, shown

MAX_SIZE = 2**24
"""Upper bound for widths and vocabularies; larger values are damage."""
MAX_LAYERS = 4096
MAX_EXPERTS = 65536
MAX_CONTEXT = 2**31

# Keys without influence on shapes or computation: bookkeeping, sampling defaults, training settings.
HARMLESS = frozenset(
    """architectures model_type torch_dtype dtype transformers_version use_cache initializer_range auto_map tokenizer_class
    pretraining_tp output_router_logits router_aux_loss_coef gradient_checkpointing max_length min_length do_sample
    temperature top_p top_k num_beams repetition_penalty task_specific_params summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj use_flash_attn return_dict output_attentions output_hidden_states
    is_decoder chunk_size_feed_forward id2label label2id problem_type finetuning_task prefix
    offset_alibi masked_softmax_fusion bias_dropout_fusion slow_but_exact skip_bias_add skip_bias_add_qkv unsloth_fixed
    inference_runner validate_runner_input pre_allocate_kv_cache max_batch_size max_sequence_length pad_key_length
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 reorder_and_upcast_attn
    ep_size aux_loss_alpha seq_aux moe_router_dtype router_jitter_noise torchscript
    use_bfloat16 tf_legacy_loss language name_or_path""".split()
)
# Harmless with this value only.
HARMLESS_WHEN: dict[str, object] = {
    "add_cross_attention": False,
    "cross_attention": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}
_HARMLESS_PATTERN = re.compile(r"_.*|.*_token_ids?|.*_token|.*dropout.*|.*_pdrop|.*_loss_coef")


def format_value(value: object) -> str:
    """repr of a value, at most 60 characters; Python cannot print values that are nested too deep or huge integers."""
    try:
        return f"{value!r:.60}"
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} too large to print"


class Config:
    """One config.json. Every reader method marks its keys as read; `finish` refuses the others."""

    def __init__(self, values: object, where: str = "config.json") -> None:
        if not isinstance(values, dict):
            raise BadConfig(f"{where}: expected a JSON object, found {type(values).__name__}")
        self.values: dict[str, Any] = {str(key): value for key, value in values.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        self.where = where
        self._read: set[str] = set()

    def refuse(self, message: str) -> BadConfig:
        """An error on one line, without unprintable characters."""
        return BadConfig(f"{self.where}: {shown(message, MAX_MESSAGE)}")

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any] | None:
        """The first of these aliases that is present. Aliases with different values are refused."""
        self._read.update(names)
        present = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        if not present:
            return None
        for name, value in present[1:]:
            if value != present[0][1]:
                raise self.refuse(
                    f"{present[0][0]} is {format_value(present[0][1])} but {name} is {format_value(value)}; they are aliases"
                )
        return present[0]

    def _missing(self, names: tuple[str, ...]) -> BadConfig:
        first, *rest = names
        others = f" (or {', '.join(rest)})" if rest else ""
        return self.refuse(f"{first}{others} is missing")

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        found = self._find(names)
        if found is None:
            if default is None:
                raise self._missing(names)
            return default
        name, value = found
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(f"{name} should be an integer, found {format_value(value)}")
        if not low <= value <= high:
            raise self.refuse(f"{name} is {format_value(value)}; expected {low} to {high}")
        return value

    def optional_integer(self, *names: str, low: int = 1, high: int = MAX_SIZE) -> int | None:
        return self.integer(*names, low=low, high=high) if self._find(names) else None

    def number(self, *names: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        found = self._find(names)
        if found is None:
            if default is None:
                raise self._missing(names)
            return default
        name, value = found
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(f"{name} should be a number, found {format_value(value)}")
        if not low <= value <= high:
            raise self.refuse(f"{name} is {format_value(value)}; expected {low:g} to {high:g}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        found = self._find(names)
        if found is None:
            return default
        name, value = found
        if not isinstance(value, bool):
            raise self.refuse(f"{name} should be true or false, found {format_value(value)}")
        return value

    def choice(self, *names: str, among: dict[str, Any], default: str | None = None) -> Any:
        found = self._find(names)
        name, value = found or (names[0], default)
        if value is None:
            raise self._missing(names)
        if not isinstance(value, str) or value not in among:
            raise self.refuse(f"{name} is {format_value(value)}; supported: {', '.join(sorted(among))}")
        return among[value]

    def strings(self, *names: str, length: int | None = None) -> tuple[str, ...] | None:
        found = self._find(names)
        if found is None:
            return None
        name, value = found
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):  # pyright: ignore[reportUnknownVariableType]
            raise self.refuse(f"{name} should be a list of strings")
        if length is not None and len(value) != length:  # pyright: ignore[reportUnknownArgumentType]
            raise self.refuse(f"{name} has {len(value)} entries for {length} layers")  # pyright: ignore[reportUnknownArgumentType]
        return tuple(str(item) for item in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def integers(self, *names: str, high: int = MAX_SIZE) -> tuple[int, ...]:
        """A list of integers; a single integer counts as a list, absent as empty."""
        found = self._find(names)
        if found is None:
            return ()
        name, value = found
        items: list[Any] = value if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownVariableType]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= high for item in items):
            raise self.refuse(f"{name} should be integers from 0 to {high}, found {format_value(items)}")
        return tuple(items)

    def section(self, *names: str) -> Config | None:
        """A nested object; call `finish` on it too."""
        found = self._find(names)
        if found is None:
            return None
        name, value = found
        if not isinstance(value, dict):
            raise self.refuse(f"{name} should be an object, found {format_value(value)}")
        return Config(value, f"{self.where}: {name}")  # pyright: ignore[reportUnknownArgumentType]

    def expect(self, name: str, *expected: object) -> None:
        """Refuses any value of this key other than these (absence is fine)."""
        found = self._find((name,))
        if found is not None and found[1] not in expected:
            raise self.refuse(f"{name} is {format_value(found[1])}; only {' or '.join(map(repr, expected))} is supported")

    def ignore(self, *names: str) -> None:
        """Marks keys as read that this family does not need."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuses unread keys."""
        for key, value in self.values.items():
            known = key in self._read or key in HARMLESS or _HARMLESS_PATTERN.fullmatch(key)
            if not known and value is not None and value != HARMLESS_WHEN.get(key):
                raise self.refuse(f"{key:.60} is not supported for this architecture (value {format_value(value)})")
