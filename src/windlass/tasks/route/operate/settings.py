"""router.toml: where the models of a router live, and how it works. Values only, checked when read."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.route.decide.policy import Policy
from windlass.tasks.route.decide.router_file import RouterFile
from windlass.tasks.route.operate.breakers import BreakerSettings

EXAMPLE = """router = "router.json"

[[models]]
name = "small"
at = "http://127.0.0.1:8001"

[[models]]
name = "large"
at = "http://10.0.0.2:8000"
"""


class ModelSettings(Frozen, forbid_unknown_fields=True):
    name: str
    """As in router.json."""
    at: str
    """A server's URL (`#NAME` for one of its models), a model of this machine as for `windlass run`, or another router.toml."""
    usd_per_million_prompt: float = 0.0
    usd_per_million_answer: float = 0.0
    usd_per_hour: float = 0.0
    watts: float | None = None
    """While it answers; None: what the table measured."""
    region: str = "world"
    """Whose electricity."""
    resident: bool = True
    """False: loaded when it is needed, in place of another one that is not resident."""
    load_seconds: float = 0.0
    api_key_env: str = ""
    """The environment variable with its API key; keys do not belong into files."""


class CascadeSettings(Frozen, forbid_unknown_fields=True):
    """What is done with an answer before it is kept."""

    first: str = ""
    """The model whose answers are checked; empty: the cheapest."""
    threshold: float | None = None
    """Of its confidence; None: the router's own, fitted from answers with log-probabilities."""
    hold_tokens: int = 64
    """A stream is held back for so many tokens; if the answer is confident until then, it is let through."""
    samples: int = 1
    """More than 1: so many answers are asked for, and the first is kept if `agreement` of them agree."""
    agreement: float = 0.6
    json: bool = True
    """Answers to requests with a JSON schema are kept only if they are valid."""
    tests: bool = False
    """Code is run in the sandbox against the `assert` lines of its prompt."""
    verifier: str = ""
    """The model that is asked whether the answer is right."""


class RouteSettings(Frozen, forbid_unknown_fields=True):
    router: str
    """The file, beside this one."""
    models: tuple[ModelSettings, ...]
    policy: Policy = Policy()
    cascade: CascadeSettings | None = None
    breaker: BreakerSettings = BreakerSettings()
    first_token_seconds: float = 30.0
    """A model that has said nothing after so long is given up for the next one."""
    sticky: bool = True
    cache_entries: int = 0
    """Exact repeats of greedy requests are answered from memory."""
    cache_seconds: float = 3600.0
    shadow: str = ""
    """The model that answers everything, while decisions are only recorded; empty: no shadow mode."""
    log: str = ""
    """JSONL of decisions, beside this file."""
    log_prompts: bool = False
    """Needed to refit from the log."""
    max_wait_seconds: float = 60.0
    """After which a request for a model that is not loaded lets no others pass."""

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise BadInput("two [[models]] of router.toml have the same name")
        for field, name in (("shadow", self.shadow), ("cascade.first", self.cascade.first if self.cascade else "")):
            if name and name not in names:
                raise BadInput(f"{field} names {name!r}, which is not among [[models]]: {', '.join(names)}")
        if self.first_token_seconds <= 0 or self.max_wait_seconds < 0:
            raise BadInput("first_token_seconds must be positive and max_wait_seconds at least 0")


def read_settings(path: Path, given: Mapping[str, str] = MappingProxyType({}), keep: int | None = None) -> RouteSettings:
    """`given`: models of the command line, by name; with them a router.json is enough. `keep`: how many of them are loaded at a time."""
    if path.suffix == ".json":
        models = tuple(ModelSettings(name=name, at=at) for name, at in given.items())
        return _kept(RouteSettings(router=path.name, models=models), given, keep)
    settings = _read_toml(path)
    known = [model.name for model in settings.models]
    for name in given:
        if name not in known:
            raise BadInput(f"{path} has no model {name}; it has {', '.join(known)}: name those of the command line NAME=MODEL")
    models = tuple(msgspec.structs.replace(one, at=given.get(one.name, one.at)) for one in settings.models)
    return _kept(msgspec.structs.replace(settings, models=models), given, keep)


def _kept(settings: RouteSettings, given: Mapping[str, str], keep: int | None) -> RouteSettings:
    """Models of this machine take turns if fewer are to be loaded than there are."""
    if keep is None or keep >= len(given):
        return settings
    if keep > 1:
        raise BadInput(f"--keep is {keep}; behind a router models take turns one at a time (--keep 1), or all are loaded")
    models = (msgspec.structs.replace(one, resident=one.resident and one.name not in given) for one in settings.models)
    return msgspec.structs.replace(settings, models=tuple(models))


def _read_toml(path: Path) -> RouteSettings:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    except DECODE_ERRORS as error:
        raise BadInput(f"{path} is not TOML: {error}") from None
    try:
        return msgspec.convert(found, RouteSettings)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: {error}{_nearest(str(error))}") from None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _nearest(message: str) -> str:
    """An unknown key is answered with the nearest known one."""
    if "unknown field" not in message:
        return ""
    wrong = message.split("`")[1]
    kinds: Sequence[type[Any]] = (RouteSettings, ModelSettings, CascadeSettings, BreakerSettings, Policy)
    known = [field.name for kind in kinds for field in msgspec.structs.fields(kind)]
    near = get_close_matches(wrong, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def check_models(settings: RouteSettings, router: RouterFile, where: str) -> None:
    """A router is of the models it was fitted to."""
    wanted, given = [model.name for model in router.models], [model.name for model in settings.models]
    missing, extra = [name for name in wanted if name not in given], [name for name in given if name not in wanted]
    if missing or extra:
        raise BadInput(
            f"{settings.router} was fitted to {', '.join(wanted)}, but {where} has {', '.join(given)}; "
            f"name [[models]] as the router does, or fit a router to answers of {', '.join(given)}"
        )
