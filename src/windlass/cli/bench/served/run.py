"""Implementation of `windlass bench --served`: options, the run, and its output."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.core.launch import Launch
from windlass.core.model import Frozen
from windlass.errors import BadInput, MissingExtra

if TYPE_CHECKING:
    from windlass.tasks.bench.served.bench import ServedSetup, TargetSpec
    from windlass.tasks.bench.served.report import ServedReport
    from windlass.tasks.bench.served.summary import Limits

FAILED = 4
"""Exit code where a load got no answer at all."""
MAX_ROUNDS = 100


class ServedOptions(Frozen):
    """The command line of `windlass bench --served`."""

    targets: tuple[str, ...]
    load: str | None = None
    at_once: str | None = None
    rate: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    requests: int | None = None
    seconds: float | None = None
    limit_first_token: float | None = None
    limit_between_tokens: float | None = None
    rounds: int | None = None
    seed: int = 0
    api_key: str | None = None
    name: str | None = None
    launch: Launch = Launch()
    compare: Path | None = None
    save: Path | None = None
    as_json: bool = False


def run(options: ServedOptions) -> int:
    from windlass.cli.bench.served.progress import showing
    from windlass.tasks.bench.served.bench import bench_served
    from windlass.tasks.bench.served.report import encode_report

    setup = make_setup(options)
    old = _earlier(options.compare)
    with showing(shown=not options.as_json) as progress:
        report = asyncio.run(bench_served(setup, progress))
    if options.save is not None:
        from windlass.model.formats.disk.atomic import write_atomically

        write_atomically(options.save, encode_report(report))
    if options.as_json:
        sys.stdout.write(encode_report(report).decode() + "\n")
    else:
        from windlass.cli.bench.served.table import show

        show(report, old, options.save)
    return 0 if all(result.answered for target in report.targets for result in target.results) else FAILED


def make_setup(options: ServedOptions) -> ServedSetup:
    from windlass.tasks.bench.served.bench import ServedSetup
    from windlass.tasks.bench.served.load import LoadOptions, make_loads, parse_at_once, parse_rates

    _check(options)
    loads = make_loads(
        LoadOptions(
            preset=options.load,
            at_once=() if options.at_once is None else parse_at_once(options.at_once),
            rates=() if options.rate is None else parse_rates(options.rate),
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            requests=options.requests,
            seconds=options.seconds,
        )
    )
    targets = _targets(options)
    return ServedSetup(
        targets=targets,
        loads=loads,
        limits=_limits(options),
        rounds=options.rounds or (1 if len(targets) == 1 else 2),
        seed=str(options.seed),
        api_key=_api_key(options.api_key),
        model=options.name,
        may_shorten=options.prompt_tokens is None and options.new_tokens is None,
    )


def _check(options: ServedOptions) -> None:
    if options.rounds is not None and not 1 <= options.rounds <= MAX_ROUNDS:
        raise BadInput(f"--rounds is {options.rounds}; it must be from 1 to {MAX_ROUNDS}")
    for flag, limit in (
        ("--limit-first-token", options.limit_first_token),
        ("--limit-between-tokens", options.limit_between_tokens),
    ):
        if limit is not None and not limit > 0:
            raise BadInput(f"{flag} is {limit:g}; it must be above 0 milliseconds")
    if options.save is not None and not options.save.absolute().parent.is_dir():
        raise BadInput(f"--save {options.save} cannot be written: directory {options.save.parent} does not exist")
    from importlib.util import find_spec

    if find_spec("httpx") is None:
        raise MissingExtra("httpx", "serve", "talking to a server")


def _targets(options: ServedOptions) -> tuple[TargetSpec, ...]:
    from windlass.tasks.bench.served.bench import parse_target

    words = launch_words(options.launch)
    targets = tuple(parse_target(text, words) for text in options.targets)
    models = [target for target in targets if not target.url]
    if words and not models:
        raise BadInput(f"{words[0]} says how a model runs; a server at a URL already does")
    if options.name is not None and len(models) == len(targets):
        raise BadInput("--name is the model's name at a URL; none is given")
    for target in models:
        _find(target.serve[0])
    return targets


def _find(model: str) -> None:
    """A mistaken name is found here, not by a server that is started for it."""
    from windlass.open.resolve import find_model

    try:
        find_model(model)
    except BadInput:
        if re.fullmatch(r"[\w.-]+:\d+(/.*)?", model):
            raise BadInput(f"{model!r} is no model; of a server give the URL: http://{model}") from None
        raise


def launch_words(launch: Launch) -> tuple[str, ...]:
    """The options that `windlass serve` needs to open a model so; nothing for what is not set."""
    default, words = Launch(), list[str]()
    layout, plain = launch.layout, default.layout
    pairs: tuple[tuple[str, object, object], ...] = (
        ("--device", launch.device, default.device),
        ("--kv", launch.kv, default.kv),
        ("--context", launch.context_tokens, default.context_tokens),
        ("--quant", launch.quant, default.quant),
        ("--speculate", launch.speculate, default.speculate),
        ("--gpu-memory", ",".join(str(size) for size in launch.gpu_memory), ""),
        ("--host-memory", launch.host_memory, default.host_memory),
        ("--disk-folder", launch.disk_folder, default.disk_folder),
        ("--workers", ",".join(str(worker) for worker in launch.workers), ""),
        ("--secret-file", launch.secret_file, default.secret_file),
        ("--sync", launch.sync, default.sync),
        ("--tp", layout.tp, plain.tp),
        ("--pp", layout.pp, plain.pp),
        ("--ep", layout.ep, plain.ep),
    )
    for flag, value, unset in pairs:
        words += [flag, str(value)] if value != unset else []
    return (*words, *(["--exact"] if launch.exact else []), *(["--deterministic"] if launch.deterministic else []))


def _limits(options: ServedOptions) -> Limits:
    from windlass.tasks.bench.served.summary import Limits

    def seconds(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else milliseconds / 1e3

    return Limits(
        first_token_seconds=seconds(options.limit_first_token),
        between_tokens_seconds=seconds(options.limit_between_tokens),
    )


def _api_key(given: str | None) -> str | None:
    """A key, a file whose first line is one, or WINDLASS_API_KEY."""
    key = given or os.environ.get("WINDLASS_API_KEY") or None
    if key is None or not Path(key).is_file():
        return key
    try:
        lines = Path(key).read_text().split()
    except (OSError, UnicodeDecodeError):
        raise BadInput(f"--api-key {key} cannot be read") from None
    if not lines:
        raise BadInput(f"--api-key {key} is empty")
    return lines[0]


def _earlier(path: Path | None) -> ServedReport | None:
    if path is None:
        return None
    from windlass.cli.bench.run import saved_report
    from windlass.tasks.bench.served.report import read_report

    return read_report(saved_report(path), str(path))
