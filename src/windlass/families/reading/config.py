"""Reads a config.json of whatever year: several names for one thing, typed, bounded, and nothing left over unread.

A key that no family asked for and that is not known to be harmless is refused by name: it may well change the mathematics.
"""

from __future__ import annotations

import re
from typing import Any

from windlass.errors import BadConfig

MAX_SIZE = 2**24
"""No width, vocabulary or context multiplier of a real model is beyond this; larger values are damage, not models."""
MAX_LAYERS = 4096
MAX_EXPERTS = 65536
MAX_CONTEXT = 2**31

# Keys that say nothing about shape or mathematics at inference: bookkeeping, sampling defaults, training settings.
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
# Harmless with this value, another model with any other.
HARMLESS_WHEN: dict[str, object] = {
    "add_cross_attention": False,
    "cross_attention": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}
_HARMLESS_PATTERN = re.compile(r"_.*|.*_token_ids?|.*_token|.*dropout.*|.*_pdrop|.*_loss_coef")


def format_value(value: object) -> str:
    """A value as far as it fits a line. Nested too deep or too long a number, Python itself cannot print it."""
    try:
        return f"{value!r:.60}"
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} too large to print"


class Config:
    """One config.json, read key by key."""

    def __init__(self, values: object, where: str = "config.json") -> None:
        if not isinstance(values, dict):
            raise BadConfig(f"{where}: expected a JSON object, found {type(values).__name__}")
        self.values: dict[str, Any] = {str(key): value for key, value in values.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        self.where = where
        self._read: set[str] = set()

    def refuse(self, message: str) -> BadConfig:
        """One line, whatever odd characters a key has."""
        return BadConfig(f"{self.where}: {''.join(mark if mark.isprintable() else '?' for mark in message)}")

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any] | None:
        """The first name that is there. Names that disagree with each other are refused, since only one can be true."""
        self._read.update(names)
        present = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        if not present:
            return None
        for name, value in present[1:]:
            if value != present[0][1]:
                raise self.refuse(
                    f"{present[0][0]} is {format_value(present[0][1])} but {name} is {format_value(value)}; they name the same thing"
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
            raise self.refuse(f"{name} should be a whole number, found {format_value(value)}")
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
            raise self.refuse(f"{name} is {format_value(value)}; known here: {', '.join(sorted(among))}")
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
        """A list of whole numbers; a single one counts as a list of one; absent is empty."""
        found = self._find(names)
        if found is None:
            return ()
        name, value = found
        items: list[Any] = value if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownVariableType]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= high for item in items):
            raise self.refuse(f"{name} should be whole numbers from 0 to {high}, found {format_value(items)}")
        return tuple(items)

    def section(self, *names: str) -> Config | None:
        """A nested object, to be read and finished like the whole."""
        found = self._find(names)
        if found is None:
            return None
        name, value = found
        if not isinstance(value, dict):
            raise self.refuse(f"{name} should be an object, found {format_value(value)}")
        return Config(value, f"{self.where}: {name}")  # pyright: ignore[reportUnknownArgumentType]

    def same(self, name: str, *expected: object) -> None:
        """A key whose only understood values are these (absence is one)."""
        found = self._find((name,))
        if found is not None and found[1] not in expected:
            raise self.refuse(f"{name} is {format_value(found[1])}; only {' or '.join(map(repr, expected))} is understood")

    def ignore(self, *names: str) -> None:
        """Keys this family knows and has no use for."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuses what nobody read."""
        for key, value in self.values.items():
            known = key in self._read or key in HARMLESS or _HARMLESS_PATTERN.fullmatch(key)
            if not known and value is not None and value != HARMLESS_WHEN.get(key):
                raise self.refuse(f"{key:.60} is not understood for this kind of model (value {format_value(value)})")
