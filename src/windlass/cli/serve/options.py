"""The command line of `windlass serve` as values: what is served, and how. Checked before anything is opened."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from windlass.core.launch import Launch
from windlass.core.model import Frozen
from windlass.errors import BadInput, MissingExtra
from windlass.units import parse_path

ENGINES = ("windlass", "vllm")


class ServeOptions(Frozen):
    """The command line of `windlass serve`."""

    models: tuple[str, ...] = ()
    route: Path | None = None
    lora: tuple[str, ...] = ()
    lora_dir: Path | None = None
    keep: int | None = None
    memory: str = ""
    unload_after: float | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_waiting: int = 64
    max_running: int | None = None
    engine: str = "windlass"
    launch: Launch = Launch()
    plan: Path | None = None
    name: str = ""
    deadline: float = 600.0
    drain: float = 30.0
    max_body: str = "8MiB"
    allow_host: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    log_prompts: bool = False
    quiet: bool = False
    page: bool = True
    tls_cert: str = ""
    tls_key: str = ""
    files: Path | None = None
    history: bool = True
    alert_webhook: str = ""
    alert_command: str = ""
    metric_aliases: bool = True
    usage_energy: bool = False
    otlp: str = ""


def check_options(options: ServeOptions) -> None:
    if not options.models and options.route is None:
        raise BadInput("name a model to serve, or a router with --route router.toml")
    if options.route is not None and options.route.suffix == ".json" and len(options.models) < 2:
        raise BadInput(
            "--route router.json needs the models that it was fitted to: windlass serve small=A large=B --route router.json"
        )
    if options.route is not None and (options.lora or options.engine != "windlass"):
        raise BadInput(
            "--lora and --engine are for models that are served without --route; a router's models may be such servers"
        )
    if options.engine != "windlass" and (len(options.models) > 1 or options.lora):
        raise BadInput("several models and --lora are for --engine windlass")
    if len(options.models) > 1 and (options.plan is not None or options.name or not options.launch.is_single):
        raise BadInput("--plan, --name, --workers and a split are for one model; name several as NAME=MODEL")
    if len(options.models) == 1 and options.route is None:
        of_several = {"--keep": options.keep, "--memory": options.memory, "--unload-after": options.unload_after}
        for flag in (flag for flag, value in of_several.items() if value):
            raise BadInput(f"{flag} is for several models, of which not all are loaded; leave it out, or name more models")
    if options.keep is not None and options.keep < 1:
        raise BadInput(f"--keep is {options.keep}; it must be at least 1")
    if (options.lora or options.lora_dir) and not options.launch.is_single:
        raise BadInput("--lora and --lora-dir are for models on one device; leave out --workers, --tp, --pp and --ep")
    if options.lora_dir is not None and (options.plan is not None or options.route is not None or options.engine != "windlass"):
        raise BadInput("--lora-dir is not for --plan, --route and --engine vllm")
    if options.lora_dir is not None and not options.lora_dir.is_dir():
        raise BadInput(
            f"--lora-dir {options.lora_dir} is not a folder; make it, or name the one that adapters may be loaded from"
        )
    if options.engine not in ENGINES:
        raise BadInput(f"--engine is {' or '.join(ENGINES)}, not {options.engine!r}")
    if options.engine != "windlass" and not options.launch.is_single:
        raise BadInput(
            "--workers, --tp, --pp and --ep are for --engine windlass; with vLLM, the plan decides how the model is split"
        )
    if options.max_running is not None and options.max_running < 1:
        raise BadInput(f"--max-running is {options.max_running}; it must be at least 1")
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingExtra("starlette", "serve", "serving a model")


class GivenModel(Frozen):
    """One MODEL of the command line."""

    model: str
    name: str = ""
    """Empty: the model's own."""


def named_models(given: Sequence[str]) -> list[GivenModel]:
    """NAME=MODEL, or MODEL; a path may contain an equals sign."""
    found: list[GivenModel] = []
    for text in given:
        name, equals, model = text.partition("=")
        is_named = bool(equals and name and model) and "/" not in name and not Path(text).exists()
        found.append(GivenModel(model=model, name=name) if is_named else GivenModel(model=text))
    return found


def adapters_of(options: Sequence[str], given: Sequence[GivenModel]) -> list[tuple[tuple[str, str], ...]]:
    """--lora [MODEL:]NAME=DIR -> the adapters of each model."""
    found: list[list[tuple[str, str]]] = [[] for _ in given]
    for text in options:
        name, equals, folder = text.partition("=")
        model, _, adapter = name.rpartition(":")
        named = (place for place, one in enumerate(given) if model in (one.name, one.model))
        place = next(named, None) if model else 0
        if not (equals and adapter and folder) or place is None:
            raise BadInput(f"--lora {text}: give NAME=DIR or MODEL:NAME=DIR, where MODEL is one that is served")
        if adapter in dict(found[place]):
            raise BadInput(f"--lora: two adapters are named {adapter}; give each its own name")
        found[place].append((adapter, str(parse_path(folder).resolve())))
    return [tuple(one) for one in found]
