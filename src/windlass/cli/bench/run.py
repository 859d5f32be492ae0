"""What `windlass bench` does with its words: the model, what the plan says of it, the measurement, and where that goes."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.cli.open.compiling import compile_kernels
from windlass.cli.open.fleet import Over
from windlass.cli.open.plan import DEVICES, KV_TYPES, stored_scheme
from windlass.core.scheme import SCHEME_NAMES, Scheme, scheme
from windlass.errors import BadInput, Error, MissingExtra, UnknownName
from windlass.families import describe, rules

if TYPE_CHECKING:
    from windlass.measure.report import BenchReport
    from windlass.measure.setup import BenchSetup

MAX_BATCH = 1024


class Options(msgspec.Struct, frozen=True, kw_only=True):
    batches: str = "1"
    prompt_tokens: int = 128
    new_tokens: int = 128
    random_weights: bool = False
    quant: str | None = None
    group: int = 128
    over: Over = Over()
    device: str = "auto"
    kv: str = "bf16"
    exact: bool = False
    profile: Path | None = None
    memory: Path | None = None
    compare: Path | None = None
    save: Path | None = None
    as_json: bool = False


def run(word: str, options: Options) -> int:
    batches = parse_batches(options.batches)
    _check(options)
    compile_kernels(not options.as_json)  # not part of what starting takes
    begin = time.perf_counter()
    old = _earlier(options.compare)
    setup = _setup(word, options, batches)
    from windlass.measure.bench import bench
    from windlass.measure.memory import MemoryLog
    from windlass.measure.trace import Trace

    log, trace = MemoryLog(), Trace() if options.profile is not None else None
    with _progress(options) as progress, _spread(options) as spread:
        report = bench(setup, begin, log, trace, _planned_bytes(setup), progress, spread)
    written = _write(report, options, log, trace)
    if options.as_json:
        from windlass.measure.report import encode_report

        sys.stdout.write(encode_report(report).decode() + "\n")
        return 0
    from windlass.cli.bench.table import show
    from windlass.measure.report import compare

    show(report, written, compare(report, old) if old is not None else ())
    return 0


def _spread(options: Options) -> Any:
    """None: there is but this process."""
    if options.over.is_one:
        return nullcontext()
    from windlass.cli.bench.ranks import FleetRanks

    return FleetRanks(options.over, (lambda _: None) if options.as_json else _remark, lambda _: None)


def _remark(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def parse_batches(text: str) -> tuple[int, ...]:
    """`1,8,32`."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"--batch is one or more numbers, as in 1,8,32, not {text!r}") from None
    if not all(1 <= batch <= MAX_BATCH for batch in found):
        raise BadInput(f"--batch is from 1 to {MAX_BATCH}, not {text!r}")
    return tuple(dict.fromkeys(found))


def _check(options: Options) -> None:
    if options.prompt_tokens < 1 or options.new_tokens < 2:
        raise BadInput("--prompt-tokens is at least 1 and --new-tokens at least 2")
    if options.device.split(":")[0] not in DEVICES:
        raise BadInput(f"--device is cpu, cuda or mps, not {options.device!r}")
    options.over.check()
    if not options.over.is_one and (options.profile or options.memory):
        raise BadInput("--profile and --memory look into one process; leave --workers, --tp and --pp out")
    if options.kv not in KV_TYPES:
        raise BadInput(f"--kv is {' or '.join(KV_TYPES)}, not {options.kv!r}")
    if options.quant is not None and not options.random_weights:
        raise BadInput("--quant is for --random-weights; a checkpoint runs as it is stored (`windlass convert` changes that)")
    if options.quant is not None and options.quant not in SCHEME_NAMES:
        raise UnknownName("quantization", options.quant, SCHEME_NAMES)
    for name, path in (("--save", options.save), ("--profile", options.profile), ("--memory", options.memory)):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInput(f"{name} {path} cannot be written: there is no directory {path.parent}")
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "run", "measuring")
    if options.memory is not None and find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot", "drawing memory")


def _earlier(path: Path | None) -> BenchReport | None:
    if path is None:
        return None
    from windlass.measure.report import read_report

    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    return read_report(text, str(path))


def _setup(word: str, options: Options, batches: tuple[int, ...]) -> BenchSetup:
    from windlass.measure.setup import BenchSetup

    common: dict[str, Any] = {
        "batches": batches,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "device": options.device,
        "kv": options.kv,
        "exact": options.exact,
    }
    if options.random_weights:
        config, name = _config(word)
        spec = describe(config, name, where=word)
        how = scheme(options.quant or "int4", options.group, options.kv)
        return BenchSetup(name=name, spec=spec, rules=rules(spec), config=config, scheme=how, **common)
    from windlass.cli.open.locate import locate
    from windlass.weights.source import open_model

    path = locate(word, shown=not options.as_json)
    opened = open_model(path)
    opened.store.close()
    return BenchSetup(
        name=opened.spec.name, path=path, spec=opened.spec, rules=opened.rules, scheme=_directory_scheme(path, options), **common
    )


def _config(word: str) -> tuple[dict[str, Any], str]:
    """A config and what to call it; no weights are needed. How the published weights are stored is of no matter."""
    from windlass.families.registry import find, published_config, unknown_model
    from windlass.formats.config import read_config
    from windlass.formats.hub.hub import fetch_config, looks_like_hub_name

    path = Path(word).expanduser()
    if path.exists():
        found, name = read_config(path), path.resolve().name if path.is_dir() else path.stem
    elif (known := find(word)) is not None:
        found, name = published_config(known), known.name
    elif looks_like_hub_name(word):
        found, name = read_config(fetch_config(word)), word.split("/")[-1]
    else:
        raise unknown_model(word)
    return {key: value for key, value in found.items() if key != "quantization_config"}, name


def _directory_scheme(path: Path, options: Options) -> Scheme | None:
    """Of a model directory, as the plan would name it; None for files with types of their own."""
    if not path.is_dir() or not (path / "config.json").is_file():
        return None
    from windlass.formats.config import read_config

    name, group = stored_scheme(read_config(path))
    return scheme(name, group, options.kv) if name in SCHEME_NAMES else None


def _planned_bytes(setup: BenchSetup) -> int | None:
    """Weights, cache and activations of this very workload, as `windlass plan` counts them; None where it cannot."""
    if setup.scheme is None:
        return None
    from windlass.cli.open.resolve import resolve_hardware
    from windlass.plan.inference.assemble import make_plan
    from windlass.plan.inference.search import Question

    question = Question(
        spec=setup.spec,
        rules=setup.rules,
        hardware=resolve_hardware("cpu:1,ram=16TB"),  # what is wanted is what the model takes, whatever this machine has
        context_tokens=setup.context_tokens,
        concurrency=max(setup.batches),
        engine="windlass",
        quant=setup.scheme.name,
        group=setup.scheme.group or 128,
        kv=setup.kv,
        prompt_tokens=setup.prompt_tokens,
        new_tokens=setup.new_tokens,
    )
    try:
        (held, *_) = make_plan(question, source=setup.name, digest="").memory.per_device
    except Error:
        return None
    return held.weights_bytes + held.kv_bytes + held.activation_bytes


def _progress(options: Options) -> Any:
    from windlass.cli.bench.progress import showing

    return showing(not options.as_json)


def _write(report: BenchReport, options: Options, log: Any, trace: Any) -> list[Path]:
    from windlass.formats.disk.atomic import write_atomically
    from windlass.measure.memory import draw
    from windlass.measure.report import encode_report

    written: list[Path] = []
    if options.save is not None:
        write_atomically(options.save, encode_report(report))
        written.append(options.save)
    if options.profile is not None:
        write_atomically(options.profile, trace.encode())
        written.append(options.profile)
    if options.memory is not None:
        draw(log, report.memory.planned_bytes, f"{report.model} {report.scheme}".strip(), options.memory)
        written.append(options.memory)
    return written
