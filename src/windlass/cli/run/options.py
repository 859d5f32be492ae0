"""What was asked of `windlass run`, and what of it changes while a chat goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.open.fleet import Over
from windlass.core.request import Sampling
from windlass.errors import BadInput, UnknownName

DEFAULTS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
"""Where neither the user nor the model's generation config says."""
FROM_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
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


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command line."""

    prompt: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    system: str | None = None
    device: str = "auto"
    kv: str | None = None
    context: str | None = None
    over: Over = Over()
    plan: Path | None = None
    exact: bool = False
    as_json: bool = False


@dataclass
class Settings:
    """What `/set` changes."""

    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    thinking: bool | None = None

    def made(self) -> Sampling:
        return Sampling(**self.sampling)

    def change(self, name: str, text: str) -> None:
        """`temperature 0.5`, `seed off`; what cannot be is refused and changes nothing."""
        key = name.replace("-", "_").lower()
        if key == "thinking":
            self.thinking = _switch(text)
        elif key == "max_tokens":
            self.max_tokens = checked_limit(_number(name, text, int), name)
        elif key in NUMBERS:
            value = _number(name, text, NUMBERS[key])
            changed = {**self.sampling, key: value} if value is not None else without(self.sampling, key)
            Sampling(**changed)
            self.sampling = changed
        else:
            raise UnknownName("setting", name, [*NUMBERS, "max_tokens", "thinking"])

    def shown(self) -> dict[str, str]:
        values: dict[str, Any] = {key: self.sampling.get(key) for key in NUMBERS}
        values |= {"max_tokens": self.max_tokens, "thinking": self.thinking}
        return {key: "-" if value is None else str(value) for key, value in values.items()}


def without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def settings_from(options: Options, generation_config: Mapping[str, Any]) -> Settings:
    """The command line, else the model's generation config, else our defaults."""
    given = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "seed")}
    settings = Settings(max_tokens=checked_limit(options.max_tokens, "--max-tokens"))
    settings.sampling = (
        DEFAULTS | from_config(generation_config) | {key: value for key, value in given.items() if value is not None}
    )
    settings.made()
    return settings


def checked_limit(max_tokens: int | None, name: str) -> int | None:
    if max_tokens is not None and max_tokens < 1:
        raise BadInput(f"{name} is {max_tokens}; it should be at least 1")
    return max_tokens


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of generation_config.json what is a usable number. Greedy models say so with do_sample; 0 means no top_k there."""
    found: dict[str, Any] = {"temperature": 0.0} if config.get("do_sample") is False else {}
    for key in FROM_CONFIG if not found else ():
        value = config.get(key)
        if isinstance(value, NUMBERS[key] | int) and not isinstance(value, bool) and (key != "top_k" or value > 0):
            found[key] = value
    try:
        Sampling(**found)
    except BadInput:  # a careless file is no reason not to run
        return {}
    return found


def read_generation_config(model: Path) -> dict[str, Any]:
    """Of the model's directory, or the one its file lies in; empty where there is none that can be read."""
    try:
        text = ((model if model.is_dir() else model.parent) / "generation_config.json").read_bytes()
        return msgspec.json.decode(text, type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


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
    raise BadInput(f"thinking is on, off or auto, not {text!r}")
