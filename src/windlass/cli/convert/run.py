"""What `windlass convert` does with its words."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.progress import byte_progress
from windlass.core.scheme import scheme
from windlass.errors import BadInput, MissingExtra
from windlass.units import parse_bytes

SPOOL = ".windlass-source"
"""Where files of a streamed source lie while they are needed, inside the output directory."""


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


def run(words: list[str], out_dir: Path | None, options: ConvertOptions) -> int:
    pairs = _pairs(words, out_dir, options)
    _check(options)
    _need_torch()
    reports = [_one(source, out, options) for source, out in pairs]
    if options.as_json:
        shown = reports[0] if out_dir is None else reports
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n")
    return 0


def _pairs(words: list[str], out_dir: Path | None, options: ConvertOptions) -> list[tuple[str, Path]]:
    if out_dir is not None:
        pairs = [(word, out_dir / f"{_name(word)}-{options.quant}") for word in words]
        outs = [out for _, out in pairs]
        for out in outs:
            if outs.count(out) > 1:
                raise BadInput(f"{outs.count(out)} of the sources would be written to {out}; convert them one by one")
        return pairs
    if len(words) != 2:
        raise BadInput("give one SOURCE and OUT, or several SOURCEs with --out-dir DIR")
    return [(words[0], Path(words[1]))]


def _name(word: str) -> str:
    path = _existing(word)
    return path.stem if path and path.is_file() else Path(word).name


def _existing(word: str) -> Path | None:
    """The file or directory that a word means; None where it is no path at all."""
    try:
        path = Path(word).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long for a name; a home of nobody
        return None


def _check(options: ConvertOptions) -> None:
    for name, value, known in (("--to", options.to, ("hf", "dllama")), ("--mtp", options.mtp, ("keep", "drop"))):
        if value not in known:
            raise BadInput(f"{name} is {' or '.join(known)}, not {value!r}")
    if options.quant not in ("int4", "int8", "fp8", "bf16", "fp32"):
        raise BadInput(f"--quant is int4, int8, fp8 or bf16, not {options.quant!r}")
    if options.quant == "fp32" and options.to == "hf":
        raise BadInput("--quant fp32 is for --to dllama; a Hugging Face directory of the weights as they are is bf16")
    if options.verify and options.to == "dllama":
        raise BadInput("--verify compares Hugging Face directories with their source; leave it out with --to dllama")
    if options.jobs < 0:
        raise BadInput("--jobs is 0 (one per core) or more")
    if options.stream and options.to == "dllama":
        raise BadInput(
            "--stream follows the order in which files arrive, and a .m file has an order of its own; download the model first"
        )
    if options.calibrate and (options.quant != "int4" or options.stream or options.to == "dllama"):
        raise BadInput("--calibrate is for --quant int4 of a model that is here: not with --stream or --to dllama")
    if options.stream and options.verify:
        raise BadInput("--verify reads the source again, which --stream has deleted; choose one")


def _need_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "run", "converting")


def _one(source: str, out: Path, options: ConvertOptions) -> Any:
    from windlass.convert.streamed import open_streamed
    from windlass.weights.source import OpenedModel, open_source

    opened: OpenedModel
    if options.stream:
        opened = open_streamed(_hub_name(source), out / SPOOL)
    else:
        opened = open_source(_local(source, options))
    if options.to == "dllama":
        return _to_dllama(opened, out, options)
    return _to_hf(opened, out, options)


def _hub_name(source: str) -> str:
    from windlass.families.registry import find
    from windlass.formats.hub.hub import looks_like_hub_name

    if _existing(source):
        raise BadInput(f"--stream is for models of the hub; {source} is here already")
    known = find(source)
    name = known.hub if known else source
    if not looks_like_hub_name(name):
        raise BadInput(f"{source!r} is no model of the hub; those are called OWNER/NAME")
    return name


def _local(source: str, options: ConvertOptions) -> Path:
    """A path, or a name that is downloaded first."""
    path = _existing(source)
    if path is not None:
        return path
    from windlass.families.registry import find, unknown_model
    from windlass.formats.hub.hub import looks_like_hub_name, pull

    known = find(source)
    name = known.hub if known else source
    if not looks_like_hub_name(name):
        raise unknown_model(source)
    return pull_with_progress(name, 8, not options.as_json, pull)


def pull_with_progress(name: str, max_workers: int, shown: bool, pull: Any) -> Path:
    with byte_progress(f"downloading {name}", shown) as started:
        state: dict[str, Any] = {"advance": None, "done": 0}

        def progress(done: int, total: int) -> None:
            if state["advance"] is None:
                state["advance"] = started(total)
            state["advance"](done - state["done"])
            state["done"] = done

        return pull(name, max_workers, progress)


def _to_hf(opened: Any, out: Path, options: ConvertOptions) -> Any:
    from windlass.convert.convert import ConvertSettings, convert_opened

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
    from windlass.convert.samples import samples_for

    if not options.as_json:
        console().print(f"sampling {'the model itself' if options.calibrate == 'self' else options.calibrate}")
    return samples_for(Path(opened.name), options.calibrate)


def _to_dllama(opened: Any, out: Path, options: ConvertOptions) -> Any:
    from windlass.convert.dllama.convert import to_dllama

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
