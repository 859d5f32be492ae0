"""Runs `windlass train data`: prepare, check or verify."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.errors import BadInput, MissingExtra
from windlass.foreign import MAX_MESSAGE, shown
from windlass.open.progress import byte_progress
from windlass.units import parse_context

if TYPE_CHECKING:
    from windlass.tasks.train.data.prepare.prepare import QualityReport
    from windlass.tasks.train.data.prepare.unit import PrepareSettings

DAMAGED = 1


class DataOptions(msgspec.Struct, frozen=True, kw_only=True):
    tokenizer: str
    validation: float
    field: str
    template: Path | None
    longest: str
    skip_bad: bool
    jobs: int
    check: bool
    verify: bool
    as_json: bool


def run(paths: list[str], options: DataOptions) -> int:
    _check(paths, options)
    _need_packages()
    if options.verify:
        return _verify([Path(path) for path in paths], options)
    settings = _settings(options)
    report = _checked(paths, settings, options) if options.check else _prepared(paths[:-1], Path(paths[-1]), settings, options)
    _show(report, None if options.check else Path(paths[-1]), options)
    return DAMAGED if options.check and report.counts.bad else 0


def _check(paths: list[str], options: DataOptions) -> None:
    if options.verify and options.check:
        raise BadInput("--check and --verify cannot be combined: --check reads sources, --verify reads shards")
    if not options.verify and not options.tokenizer:
        raise BadInput("--tokenizer is required: a model's directory or .gguf")
    if not options.verify and not options.check and len(paths) < 2:
        raise BadInput("give at least one source and an output directory; or use --check to only report")
    if not 0 <= options.validation < 1:
        raise BadInput(f"--validation is {options.validation:g}; it is a fraction of the documents: at least 0 and less than 1")
    if options.jobs < 0:
        raise BadInput("--jobs must be at least 0 (one per core)")


def _need_packages() -> None:
    from importlib.util import find_spec

    for package in ("numpy", "tokenizers"):
        if find_spec(package) is None:
            raise MissingExtra(package, "train", "preparing data")


def _settings(options: DataOptions) -> PrepareSettings:
    from windlass.tasks.train.data.prepare.unit import PrepareSettings

    return PrepareSettings(
        tokenizer=options.tokenizer,
        template=_read_template(options.template),
        field=options.field or None,
        validation=options.validation,
        longest=parse_context(options.longest),
        skip_bad=options.skip_bad or options.check,
    )


def _read_template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the chat template {file}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None


def _prepared(sources: list[str], out: Path, settings: PrepareSettings, options: DataOptions) -> QualityReport:
    from windlass.tasks.train.data.prepare.prepare import prepare

    with byte_progress(f"preparing {out}", not options.as_json) as started:
        return prepare(sources, out, settings, jobs=options.jobs, started=started)


def _checked(sources: list[str], settings: PrepareSettings, options: DataOptions) -> QualityReport:
    from windlass.tasks.train.data.prepare.prepare import check

    with byte_progress("checking", not options.as_json) as started:
        return check(sources, settings, jobs=options.jobs, started=started)


def _show(report: QualityReport, out: Path | None, options: DataOptions) -> None:
    if options.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
        return
    from windlass.cli.train.data_table import show_report

    show_report(report, out)


def _verify(folders: list[Path], options: DataOptions) -> int:
    from windlass.tasks.train.data.shards import find_damage, read_manifest

    manifests = [read_manifest(folder) for folder in folders]
    total = sum(stored.num_bytes for manifest in manifests for shard in manifest.shards for stored in shard.files.values())
    with byte_progress("verifying", not options.as_json) as started:
        seen = started(total)
        found = [
            line for folder, manifest in zip(folders, manifests, strict=True) for line in find_damage(folder, manifest, seen)
        ]
    if options.as_json:
        sys.stdout.write(msgspec.json.encode({"damaged": found, "bytes": total}).decode() + "\n")
    for line in () if options.as_json else found:
        print(f"windlass: {shown(line, MAX_MESSAGE)}", file=sys.stderr)
    if not found and not options.as_json:
        print(f"{sum(len(manifest.shards) for manifest in manifests)} shards verified")
    return DAMAGED if found else 0
