"""Implementation of `windlass bench`: options, planned memory, the run, and its output."""

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


def run(model: str, options: Options) -> int:
    batches = parse_batches(options.batches)
    _check(options)
    compile_kernels(not options.as_json)  # not part of the startup time
    begin = time.perf_counter()
    old = _earlier(options.compare)
    setup = _setup(model, options, batches)
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
    """None: a single process."""
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
        raise BadInput(f"--batch must be a list of integers like 1,8,32, not {text!r}") from None
    if not all(1 <= batch <= MAX_BATCH for batch in found):
        raise BadInput(f"--batch must be from 1 to {MAX_BATCH}, not {text!r}")
    return tuple(dict.fromkeys(found))


def _check(options: Options) -> None:
    if options.prompt_tokens < 1 or options.new_tokens < 2:
        raise BadInput("--prompt-tokens must be at least 1 and --new-tokens at least 2")
    if options.device.split(":")[0] not in DEVICES:
        raise BadInput(f"--device must be cpu, cuda or mps, not {options.device!r}")
    options.over.check()
    if not options.over.is_one and (options.profile or options.memory):
        raise BadInput("--profile and --memory need a single process; leave out --workers, --tp and --pp")
    if options.kv not in KV_TYPES:
        raise BadInput(f"--kv must be {' or '.join(KV_TYPES)}, not {options.kv!r}")
    if options.quant is not None and not options.random_weights:
        raise BadInput("--quant needs --random-weights; a checkpoint runs as stored (use `windlass convert` to quantize it)")
    if options.quant is not None and options.quant not in SCHEME_NAMES:
        raise UnknownName("quantization", options.quant, SCHEME_NAMES)
    for name, path in (("--save", options.save), ("--profile", options.profile), ("--memory", options.memory)):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInput(f"{name} {path} cannot be written: directory {path.parent} does not exist")
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "run", "benchmarking")
    if options.memory is not None and find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot", "plotting memory")


def _earlier(path: Path | None) -> BenchReport | None:
    if path is None:
        return None
    from windlass.measure.report import read_report

    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    return read_report(text, str(path))


def _setup(model: str, options: Options, batches: tuple[int, ...]) -> BenchSetup:
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
        config, name = _config(model)
        spec = describe(config, name, where=model)
        how = scheme(options.quant or "int4", options.group, options.kv)
        return BenchSetup(name=name, spec=spec, rules=rules(spec), config=config, scheme=how, **common)
    from windlass.cli.open.locate import locate
    from windlass.weights.source import open_model

    path = locate(model, shown=not options.as_json)
    opened = open_model(path)
    opened.store.close()
    return BenchSetup(
        name=opened.spec.name, path=path, spec=opened.spec, rules=opened.rules, scheme=_directory_scheme(path, options), **common
    )


def _config(model: str) -> tuple[dict[str, Any], str]:
    """Config and display name; needs no weights. Without quantization_config, since the weights are random."""
    from windlass.families.registry import find, published_config, unknown_model
    from windlass.formats.config import read_config
    from windlass.formats.hub.hub import fetch_config, looks_like_hub_name

    path = Path(model).expanduser()
    if path.exists():
        found, name = read_config(path), path.resolve().name if path.is_dir() else path.stem
    elif (known := find(model)) is not None:
        found, name = published_config(known), known.name
    elif looks_like_hub_name(model):
        found, name = read_config(fetch_config(model)), model.split("/")[-1]
    else:
        raise unknown_model(model)
    return {key: value for key, value in found.items() if key != "quantization_config"}, name


def _directory_scheme(path: Path, options: Options) -> Scheme | None:
    """Scheme of a model directory; None for GGUF and .m files."""
    if not path.is_dir() or not (path / "config.json").is_file():
        return None
    from windlass.formats.config import read_config

    name, group = stored_scheme(read_config(path))
    return scheme(name, group, options.kv) if name in SCHEME_NAMES else None


def _planned_bytes(setup: BenchSetup) -> int | None:
    """Weights, KV cache and activations of this workload according to the planner; None where it has no prediction."""
    if setup.scheme is None:
        return None
    from windlass.cli.open.resolve import resolve_hardware
    from windlass.plan.inference.assemble import make_plan
    from windlass.plan.inference.search import Question

    question = Question(
        spec=setup.spec,
        rules=setup.rules,
        hardware=resolve_hardware("cpu:1,ram=16TB"),  # memory use only, independent of this machine
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
        (memory, *_) = make_plan(question, source=setup.name, digest="").memory.per_device
    except Error:
        return None
    return memory.weights_bytes + memory.kv_bytes + memory.activation_bytes


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
