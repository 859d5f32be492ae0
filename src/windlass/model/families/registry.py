"""The registry of models known by name (registry.toml): hub name, aliases, and how the config was verified."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from windlass.core.model import Frozen, ModelSpec
from windlass.errors import Impossible, UnknownName
from windlass.model.families import Hints, describe


class PublishedFiles(Frozen):
    """The same model, quantized by its publisher."""

    hub: str
    scheme: str
    """Ours that is nearest: `int8` for Q8_0, `int4` for Q4_K_M."""
    file: str = ""
    """One .gguf file; empty: the whole repository."""


class KnownModel(Frozen):
    name: str
    hub: str
    check: str
    """`count`, `read`, `cross` or `memory`: how the config was verified."""
    config: str = ""
    aliases: tuple[str, ...] = ()
    own_next_token_embeddings: bool | None = None
    """Set where the published config does not say what the files contain."""
    note: str = ""
    quantized: tuple[PublishedFiles, ...] = ()
    """Least lossy first."""

    def names(self) -> tuple[str, ...]:
        return (self.name, self.hub, self.hub.split("/")[-1], *self.aliases)


class BeyondReach(Frozen):
    """A model that cannot be described yet."""

    names: tuple[str, ...]
    why: str


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(files("windlass.model.families").joinpath("registry.toml").read_text())


@cache
def beyond_reach() -> tuple[BeyondReach, ...]:
    return tuple(msgspec.convert(_tables()["beyond"], list[BeyondReach]))


@cache
def known_models() -> tuple[KnownModel, ...]:
    return tuple(msgspec.convert(_tables()["model"], list[KnownModel]))


def find(name: str) -> KnownModel | None:
    wanted = name.lower()
    for strict in (True, False):
        for model in known_models():
            names = (model.name, model.hub) if strict else model.names()
            if wanted in (candidate.lower() for candidate in names):
                return model
    return _find_tagged(name)


def _find_tagged(name: str) -> KnownModel | None:
    """`qwen3:8b`, `llama3.3:70b`: as Ollama writes a name and its size. Only letters, digits and dots count."""
    if name.count(":") != 1:
        return None
    wanted = _squeezed(name)
    return next((model for model in known_models() if wanted in map(_squeezed, model.names())), None)


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def refuse_beyond_reach(name: str) -> None:
    """Says why a model that people ask for cannot be planned or run, rather than that it is unknown."""
    for one in beyond_reach():
        if name.lower() in (other.lower() for other in one.names):
            raise Impossible(f"{name} cannot be planned or run yet: {one.why}")


def unknown_model(name: str, also: Iterable[str] = ()) -> UnknownName:
    """`also`: further names that would have been found."""
    return UnknownName("model", name, [*also, *(model.name for model in known_models())])


def published_config(model: KnownModel) -> dict[str, Any]:
    """config.json as published on the hub."""
    file = model.config or model.hub.replace("/", "--") + ".json"
    return msgspec.json.decode(files("windlass.model.families").joinpath("configs", file).read_bytes(), type=dict[str, Any])


def spec_of(model: KnownModel) -> ModelSpec:
    hints = Hints(own_next_token_embeddings=model.own_next_token_embeddings)
    return describe(published_config(model), model.name, hints=hints, where=f"{model.hub}: config.json")
