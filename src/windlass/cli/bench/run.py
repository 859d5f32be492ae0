"""Implementation of `windlass bench`: options, planned memory, the run, and its output."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.core.launch import Launch, RandomInit, check_quant
from windlass.core.scheme import SCHEME_NAMES, Scheme, scheme
from windlass.errors import BadInput, Error, MissingExtra
from windlass.model.families import describe, rules
from windlass.open.compile import compile_kernels
from windlass.open.scheme import stored_scheme

if TYPE_CHECKING:
    from windlass.tasks.bench.report import BenchReport
    from windlass.tasks.bench.setup import BenchSetup

MAX_BATCH = 1024


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    batches: str = "1"
    prompt_tokens: int = 128
    new_tokens: int = 128
    random_weights: bool = False
    quant: str | None = None
    group: int = 128
    launch: Launch = Launch()
    profile: Path | None = None
    memory: Path | None = None
    compare: Path | None = None
    save: Path | None = None
    as_json: bool = False
    keep: bool = True


def run(model: str, options: BenchOptions) -> int:
    batches = parse_batches(options.batches)
    _check(options)
    compile_kernels(not options.as_json, options.launch.device)  # not part of the startup time
    begin = time.perf_counter()
    old = _earlier(options.compare)
    setup = _setup(model, options, batches)
    from windlass.tasks.bench.bench import bench
    from windlass.tasks.bench.memory import MemoryLog
    from windlass.tasks.bench.trace import Trace

    log, trace = MemoryLog(), Trace() if options.profile is not None else None
    with _progress(options) as progress, _spread(options) as spread:
        report = bench(setup, begin, log, trace, _planned_bytes(setup), progress, spread)
    written = _write(report, options, log, trace)
    how = kept_as(setup) if options.keep else None
    if how is not None:
        _keep(report, how)
    if options.as_json:
        from windlass.tasks.bench.report import encode_report

        sys.stdout.write(encode_report(report).decode() + "\n")
        return 0
    from windlass.cli.bench.table import show
    from windlass.tasks.bench.report import compare

    show(report, written, compare(report, old) if old is not None else ())
    if options.launch.speculate != "off":
        from windlass.cli.bench.table import SPECULATION_NOTE
        from windlass.cli.console import console

        console().print(SPECULATION_NOTE)
    return 0


def kept_as(setup: BenchSetup) -> Scheme | None:
    """The scheme as a plan would name it, of files with types of their own too; None: a plan is about something else than what was measured."""
    launch = setup.launch
    if not launch.is_single or launch.speculate != "off" or launch.exact or launch.deterministic:
        return None
    if setup.scheme is not None or launch.quant is not None:
        return setup.scheme
    from windlass.open.stored import stored_files

    return stored_files(Path(launch.model)).scheme


def _keep(report: BenchReport, how: Scheme) -> None:
    """For the next plan on this machine; not with weights outside of memory, whose speed is the disk's."""
    from windlass.core.hardware.measured import MeasuredRun
    from windlass.tasks.bench import kept

    if not kept.wanted() or report.tiers is not None:
        return
    machine = kept.this_machine()
    runs = tuple(
        MeasuredRun(
            machine=machine,
            model=report.model,
            engine="windlass",
            scheme=how.name,
            batch=one.batch,
            prompt_tokens=one.prompt_tokens,
            new_tokens=one.new_tokens,
            decode_tokens_per_second=one.decode_tokens_per_second,
            prefill_tokens_per_second=one.prefill_tokens_per_second,
            date=time.strftime("%Y-%m-%d"),
        )
        for one in report.runs
        if one.tokens_per_step == 1.0
    )
    kept.save(kept.with_runs(kept.load(), runs))


def _spread(options: BenchOptions) -> Any:
    """None: there is but this process."""
    if options.launch.is_single:
        return nullcontext()
    from windlass.cli.bench.ranks import InlineRanks

    return InlineRanks((lambda _: None) if options.as_json else _remark, lambda _: None)


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


def _check(options: BenchOptions) -> None:
    if options.prompt_tokens < 1 or options.new_tokens < 2:
        raise BadInput("--prompt-tokens is at least 1 and --new-tokens at least 2")
    if not options.launch.is_single and (options.profile or options.memory):
        raise BadInput("--profile and --memory measure one process; leave --workers, --tp and --pp out")
    if not options.random_weights:
        check_quant(options.launch)
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
    from windlass.tasks.bench.report import read_report

    return read_report(saved_report(path), str(path))


def saved_report(path: Path) -> bytes:
    """What --save wrote."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None


def _setup(name: str, options: BenchOptions, batches: tuple[int, ...]) -> BenchSetup:
    from windlass.tasks.bench.setup import BenchSetup

    common: dict[str, Any] = {"batches": batches, "prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens}
    if options.random_weights:
        from windlass.open.resolve import model_config

        config, label = model_config(name)
        config = {
            key: value for key, value in config.items() if key != "quantization_config"
        }  # how it is published does not matter
        spec = describe(config, label, where=name)
        how = scheme(options.quant or "int4", options.group, options.launch.kv_type)
        random = RandomInit(config=config, scheme=how.name, group=how.group)
        launch = msgspec.structs.replace(options.launch, model=label, random_weights=random, quant=None)
        return BenchSetup(name=label, spec=spec, rules=rules(spec), launch=launch, scheme=how, **common)
    from windlass.open.drafts import with_draft_model
    from windlass.open.resolve import runnable_files
    from windlass.runtime.weights.source import open_model

    path = runnable_files(name, shown=not options.as_json)
    opened = open_model(path)
    opened.store.close()
    launch = with_draft_model(msgspec.structs.replace(options.launch, model=str(path)), shown=not options.as_json)
    how = _directory_scheme(path, options)
    return BenchSetup(name=opened.spec.name, spec=opened.spec, rules=opened.rules, launch=launch, scheme=how, **common)


def _directory_scheme(path: Path, options: BenchOptions) -> Scheme | None:
    """Of a model directory, as the plan would name it; None for files with types of their own."""
    if not path.is_dir() or not (path / "config.json").is_file():
        return None
    from windlass.model.formats.config import read_config

    if options.launch.quant is not None:
        return scheme(options.launch.quant, None, options.launch.kv_type)
    name, group = stored_scheme(read_config(path))
    return scheme(name, group, options.launch.kv_type) if name in SCHEME_NAMES else None


def _planned_bytes(setup: BenchSetup) -> int | None:
    """Weights, KV cache and activations of this workload according to the planner; None where it has no prediction."""
    if setup.scheme is None:
        return None
    from windlass.open.hardware import resolve_hardware
    from windlass.tasks.plan.inference.assemble import make_plan
    from windlass.tasks.plan.inference.search.request import PlanRequest

    question = PlanRequest(
        spec=setup.spec,
        rules=setup.rules,
        hardware=resolve_hardware("cpu:1,ram=16TB"),  # memory use only, independent of this machine
        context_tokens=setup.context_tokens,
        concurrency=max(setup.batches),
        engine="windlass",
        quant=setup.scheme.name,
        group=setup.scheme.group or 128,
        kv=setup.launch.kv_type,
        prompt_tokens=setup.prompt_tokens,
        new_tokens=setup.new_tokens,
    )
    try:
        (memory, *_) = make_plan(question, source=setup.name, digest="").memory.per_device
    except Error:
        return None
    return memory.weights_bytes + memory.kv_bytes + memory.activation_bytes


def _progress(options: BenchOptions) -> Any:
    from windlass.cli.bench.progress import showing

    return showing(not options.as_json)


def _write(report: BenchReport, options: BenchOptions, log: Any, trace: Any) -> list[Path]:
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.tasks.bench.memory import draw
    from windlass.tasks.bench.report import encode_report

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
