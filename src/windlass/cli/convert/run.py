"""Implementation of `windlass convert`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.convert.advice import offer, warnings
from windlass.core.scheme import GROUPS, scheme
from windlass.errors import BadInput, MissingExtra
from windlass.foreign import MAX_MESSAGE, shown
from windlass.open.progress import byte_progress, token_progress
from windlass.runtime.machine.torch_import import importing
from windlass.units import parse_bytes

SPOOL = ".windlass-source"
"""Directory for files of a streamed source, inside the output directory."""


GGUF_TYPES = {"int4": "Q4_K_M", "int8": "Q8_0", "bf16": "F16", "q4_0": "Q4_0"}
"""--quant -> the file type of --to gguf; llama.cpp's own names work, too."""


class ConvertOptions(msgspec.Struct, frozen=True, kw_only=True):
    quant: str
    group: int
    asymmetric: bool
    calibrate: str
    to: str
    max_memory: str
    jobs: int
    keep: tuple[str, ...]
    head: bool
    mtp: str
    stream: bool
    verify: bool
    as_json: bool


def run(arguments: list[str], out_dir: Path | None, options: ConvertOptions) -> int:
    pairs = _pairs(arguments, out_dir, options)
    options = msgspec.structs.replace(options, to=options.to or format_of(pairs[0][1] if out_dir is None else None))
    _check(options)
    _need_torch()
    reports = [_one(source, out, options) for source, out in pairs]
    if options.as_json:
        shown = reports[0] if out_dir is None else reports
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n")
    return 0


def format_of(out: Path | None) -> str:
    """What the name of the output asks for: a directory called `model.gguf` is nobody's wish."""
    return {".gguf": "gguf", ".m": "dllama"}.get(out.suffix.lower() if out else "", "hf")


def _pairs(arguments: list[str], out_dir: Path | None, options: ConvertOptions) -> list[tuple[str, Path]]:
    if out_dir is not None:
        pairs = [(source, out_dir / f"{_name(source)}-{options.quant}") for source in arguments]
        outs = [out for _, out in pairs]
        for out in outs:
            if outs.count(out) > 1:
                raise BadInput(f"{outs.count(out)} sources would be written to {out}; convert them one at a time")
        return pairs
    if len(arguments) != 2:
        raise BadInput("give one SOURCE and OUT, or several SOURCEs with --out-dir DIR")
    return [(arguments[0], Path(arguments[1]))]


def _name(source: str) -> str:
    path = _existing(source)
    return path.stem if path and path.is_file() else Path(source).name


def _existing(source: str) -> Path | None:
    """The path, if it exists; None for names of models."""
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # name too long; unknown user in ~user
        return None


def _check(options: ConvertOptions) -> None:
    for name, value, known in (("--to", options.to, ("hf", "dllama", "gguf")), ("--mtp", options.mtp, ("keep", "drop"))):
        if value not in known:
            raise BadInput(f"{name} must be {' or '.join(known)}, not {value!r}")
    if options.jobs < 0:
        raise BadInput("--jobs must be 0 (one per core) or more")
    if options.to != "hf":
        _check_own_types(options)
    if options.to == "gguf":
        _check_gguf(options)
        return
    if options.quant not in ("int4", "int8", "fp8", "bf16", "fp32"):
        raise BadInput(f"--quant must be int4, int8, fp8 or bf16, not {options.quant!r}")
    if options.quant == "fp32" and options.to == "hf":
        raise BadInput("--quant fp32 is only for --to dllama; use --quant bf16 for unquantized weights")
    if options.verify and options.to == "dllama":
        raise BadInput("--verify is not supported with --to dllama")
    if options.stream and options.to == "dllama":
        raise BadInput("--stream is not supported with --to dllama, whose tensors have a fixed order; download the model first")
    if options.calibrate and (options.quant != "int4" or options.stream or options.to == "dllama"):
        raise BadInput("--calibrate needs --quant int4 and a local model; it cannot be used with --stream or --to dllama")
    if options.stream and options.verify:
        raise BadInput("--verify needs the source, which --stream deletes; use only one of them")


def _check_own_types(options: ConvertOptions) -> None:
    """Files of other programs store each matrix as those programs expect it."""
    given = {
        "--keep": options.keep,
        "--quantize-head": options.head,
        "--asymmetric": options.asymmetric,
        "--group": options.group != max(GROUPS),
    }
    for name, value in given.items():
        if value:
            raise BadInput(f"{name} is not supported with --to {options.to}, whose types and groups are its own; leave it out")


def _check_gguf(options: ConvertOptions) -> None:
    if options.quant.upper() not in GGUF_TYPES.values() and options.quant not in GGUF_TYPES:
        raise BadInput(f"--to gguf writes --quant {', '.join(GGUF_TYPES.values())}, not {options.quant!r}")
    refused = {"--stream": options.stream, "--verify": options.verify, "--calibrate": options.calibrate}
    for name, given in refused.items():
        if given:
            raise BadInput(f"{name} is not supported with --to gguf")


def _need_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "run", "converting")


def _one(source: str, out: Path, options: ConvertOptions) -> Any:
    from windlass.open.resolve import model_files
    from windlass.runtime.weights.source import OpenedModel, open_source
    from windlass.tasks.convert.streamed import open_streamed

    opened: OpenedModel
    if options.stream:
        opened = open_streamed(_hub_name(source), out / SPOOL)
    else:
        opened = open_source(model_files(source, shown=not options.as_json))
    if options.to == "gguf":
        return _to_gguf(opened, out, options)
    stored_as = _warn(opened, options)
    if options.to == "dllama":
        return _to_dllama(opened, out, options)
    from windlass.cli.console import console

    made = _to_hf(opened, out, options)
    if not options.as_json and (offered := offer(stored_as, options.quant, bool(options.calibrate))):
        console().print(f"[bold]note[/]   {offered}")
    return made


def _warn(opened: Any, options: ConvertOptions) -> str:
    """Before it begins: Ctrl-C costs nothing yet. Returns how the source is stored."""
    if options.as_json or options.stream:
        return ""
    from windlass.open.stored import stored_files
    from windlass.tasks.plan.inference.assemble import checkpoint_bytes

    found = stored_files(Path(opened.name))
    how = scheme(options.quant, options.group, zero_points=options.asymmetric)
    stored_as = found.label if found.scheme is not None else ""
    output_bytes = checkpoint_bytes(opened.rules, how, published=False)
    for line in warnings(stored_as, found.num_bytes, output_bytes, options.quant):
        print(f"note: {shown(line, MAX_MESSAGE)}", file=sys.stderr, flush=True)
    return stored_as


def _to_gguf(opened: Any, out: Path, options: ConvertOptions) -> Any:
    with importing():
        from windlass.tasks.convert.gguf.convert import to_gguf

    kind = GGUF_TYPES.get(options.quant, options.quant.upper())
    try:
        with byte_progress(f"converting {opened.spec.name}", not options.as_json) as started:
            made = to_gguf(opened, out, kind, started, options.jobs)
    finally:
        opened.store.close()
    if not options.as_json:
        from windlass.cli.convert.table import show_gguf

        show_gguf(made)
    return made


def _hub_name(source: str) -> str:
    from windlass.open.resolve import find_model

    found = find_model(source)
    if found.path is not None:
        raise BadInput(f"--stream is for models on the hub, but {source} is local; leave it out")
    return found.hub


def _to_hf(opened: Any, out: Path, options: ConvertOptions) -> Any:
    with importing():
        from windlass.tasks.convert.convert import ConvertSettings, convert_opened

    how = scheme(options.quant, options.group, zero_points=options.asymmetric)
    settings = ConvertSettings(
        scheme=msgspec.structs.replace(how, quantize_head=options.head),
        max_memory_bytes=parse_bytes(options.max_memory),
        jobs=options.jobs,
        keep=options.keep,
        mtp=options.mtp == "keep",
        verify=options.verify,
        samples=_samples(opened, options),
    )
    with byte_progress(f"converting {opened.spec.name}", not options.as_json) as started:
        report = convert_opened(opened, out, settings, started)
    if not options.as_json:
        from windlass.cli.convert.table import show_report

        show_report(report, out)
    return report


def _samples(opened: Any, options: ConvertOptions) -> tuple[tuple[int, ...], ...]:
    if not options.calibrate:
        return ()
    from windlass.cli.console import console
    from windlass.tasks.convert.samples import samples_for

    if not options.as_json:
        console().print(f"calibrating on {'text sampled from the model' if options.calibrate == 'self' else options.calibrate}")
    with token_progress("sampling", not options.as_json) as progress:
        return samples_for(Path(opened.name), options.calibrate, progress)


def _to_dllama(opened: Any, out: Path, options: ConvertOptions) -> Any:
    with importing():
        from windlass.tasks.convert.dllama.convert import to_dllama

    jobs = options.jobs or len(os.sched_getaffinity(0))
    try:
        with byte_progress(f"converting {opened.spec.name}", not options.as_json) as started:
            made = to_dllama(opened, Path(opened.name), out, options.quant, jobs, started)
    finally:
        opened.store.close()
    if not options.as_json:
        from windlass.cli.convert.table import show_dllama

        show_dllama(made)
    return made
