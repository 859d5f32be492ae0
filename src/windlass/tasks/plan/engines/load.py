"""Reads the engines' files. One is read when it is asked for: `windlass plan --engine vllm` reads one."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.hardware.spec import Device
from windlass.errors import UnknownName
from windlass.tasks.plan.engines.classes import device_class
from windlass.tasks.plan.engines.profile import EngineProfile, Rates

FOLDER = Path(__file__).parent
NAMES = ("windlass", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "ik_llama.cpp", "ktransformers", "mlx")
ALIASES = {
    "ollama": "llama.cpp", "lmstudio": "llama.cpp", "lm-studio": "llama.cpp", "llamacpp": "llama.cpp",
    "ik": "ik_llama.cpp", "kt": "ktransformers", "trtllm": "tensorrt-llm", "trt-llm": "tensorrt-llm", "tensorrt": "tensorrt-llm",
    "nim": "tensorrt-llm", "mlx-lm": "mlx",
}  # fmt: skip
"""Programs that run another's engine, and other spellings."""


@cache
def engine(name: str) -> EngineProfile:
    key = name.lower().replace(" ", "")
    key = ALIASES.get(key, key)
    if key not in NAMES:
        raise UnknownName("engine", name, (*NAMES, *ALIASES))
    return msgspec.convert(_table(key), EngineProfile)


def _table(name: str) -> dict[str, Any]:
    """With what it takes from the engine that it is like; rates are merged class by class."""
    found: dict[str, Any] = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    default: dict[str, Any] = found.get("rates", {}).get("default", {})
    if "like" not in found:
        return {**found, "rates": {key: {**default, **value} for key, value in found["rates"].items()}}
    parent = _table(found["like"])
    rates: dict[str, Any] = {key: {**value, **default} for key, value in parent["rates"].items()}
    for key, value in found.get("rates", {}).items():
        rates[key] = {**rates.get(key, rates["default"]), **value}
    return {**parent, **found, "rates": rates}


def rates_on(profile: EngineProfile, device: Device) -> Rates:
    found = device_class(device)
    return profile.rates.get(found) or profile.rates.get(found.partition("-")[0]) or profile.rates["default"]


def knows(profile: EngineProfile, device: Device) -> bool:
    """Whether its file has figures of this class of device."""
    return device_class(device).partition("-")[0] in profile.rates


def loads_scheme(profile: EngineProfile, scheme_name: str) -> bool:
    return not profile.schemes or any(fnmatch(scheme_name.lower(), pattern) for pattern in profile.schemes)
