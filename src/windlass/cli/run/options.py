"""Options of `windlass run`, and the settings that `/set` changes during a chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.launch import Launch
from windlass.core.request import Sampling
from windlass.errors import BadInput, UnknownName
from windlass.open.generation import DEFAULTS

NUMBERS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}
OFF = ("off", "none", "no", "false")
ON = ("on", "yes", "true")


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `windlass run`."""

    prompt: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    system: str | None = None
    launch: Launch = Launch()
    plan: Path | None = None
    as_json: bool = False
    allow_loops: bool = False


@dataclass
class ChatSettings:
    """What `/set` changes."""

    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    thinking: bool | None = None
    stop_loops: bool = True
    """Whether an answer that only repeats itself is stopped."""

    def sampling_params(self) -> Sampling:
        return Sampling(**self.sampling)

    def change(self, name: str, text: str) -> None:
        """`temperature 0.5`, `seed off`; an invalid value is refused and changes nothing."""
        key = name.replace("-", "_").lower()
        if key == "thinking":
            self.thinking = _switch(text)
        elif key == "stop_loops":
            self.stop_loops = bool(_switch(text))
        elif key == "max_tokens":
            self.max_tokens = checked_limit(_number(name, text, int), name)
        elif key in NUMBERS:
            value = _number(name, text, NUMBERS[key])
            changed = {**self.sampling, key: value} if value is not None else without(self.sampling, key)
            Sampling(**changed)
            self.sampling = changed
        else:
            raise UnknownName("setting", name, [*NUMBERS, "max_tokens", "thinking", "stop_loops"])

    def shown(self) -> dict[str, str]:
        values: dict[str, Any] = {key: self.sampling.get(key) for key in NUMBERS}
        values |= {"max_tokens": self.max_tokens, "thinking": self.thinking, "stop_loops": self.stop_loops}
        return {key: "-" if value is None else str(value) for key, value in values.items()}


def without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def settings_from(options: RunOptions, generation: Mapping[str, Any]) -> ChatSettings:
    """The command line, else the model's generation config, else our defaults."""
    given = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "seed")}
    settings = ChatSettings(max_tokens=checked_limit(options.max_tokens, "--max-tokens"), stop_loops=not options.allow_loops)
    settings.sampling = DEFAULTS | dict(generation) | {key: value for key, value in given.items() if value is not None}
    settings.sampling_params()
    return settings


def checked_limit(max_tokens: int | None, name: str) -> int | None:
    if max_tokens is not None and max_tokens < 1:
        raise BadInput(f"{name} is {max_tokens}; it should be at least 1")
    return max_tokens


def _number(name: str, text: str, kind: type) -> Any:
    if text.lower() in OFF:
        return None
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise BadInput(f"{name} should be {what} or off, not {text!r}") from None


def _switch(text: str) -> bool | None:
    if text.lower() in ON:
        return True
    if text.lower() in OFF:
        return False
    if text.lower() in ("auto", "-"):
        return None
    raise BadInput(f"write on, off or auto, not {text!r}")
