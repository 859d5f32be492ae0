"""What `windlass train data` does with its words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.errors import BadInput, MissingExtra
from windlass.open.progress import byte_progress
from windlass.units import parse_context

if TYPE_CHECKING:
    from windlass.train.data.prepare.prepare import Report
    from windlass.train.data.prepare.unit import Settings

DAMAGED = 1


class Options(msgspec.Struct, frozen=True, kw_only=True):
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


def run(words: list[str], options: Options) -> int:
    _check(words, options)
    _need_packages()
    if options.verify:
        return _verify([Path(word) for word in words], options)
    settings = _settings(options)
    report = _checked(words, settings, options) if options.check else _prepared(words[:-1], Path(words[-1]), settings, options)
    _show(report, None if options.check else Path(words[-1]), options)
    return DAMAGED if options.check and report.counts.bad else 0


def _check(words: list[str], options: Options) -> None:
    if options.verify and options.check:
        raise BadInput("--check reads sources and --verify reads shards; choose one")
    if not options.verify and not options.tokenizer:
        raise BadInput("--tokenizer is missing: say whose tokenizer is to be used, a model's directory or .gguf")
    if not options.verify and not options.check and len(words) < 2:
        raise BadInput("give SOURCES and then OUT; or --check, to look at the sources only")
    if not 0 <= options.validation < 1:
        raise BadInput(f"--validation is {options.validation:g}; it is a share of the documents, from 0 to less than 1")
    if options.jobs < 0:
        raise BadInput("--jobs is 0 (one per core) or more")


def _need_packages() -> None:
    from importlib.util import find_spec

    for package in ("numpy", "tokenizers"):
        if find_spec(package) is None:
            raise MissingExtra(package, "train", "preparing data")


def _settings(options: Options) -> Settings:
    from windlass.train.data.prepare.unit import Settings

    return Settings(
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
        raise BadInput(f"the template {file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None


def _prepared(sources: list[str], out: Path, settings: Settings, options: Options) -> Report:
    from windlass.train.data.prepare import prepare

    with byte_progress(f"preparing {out}", not options.as_json) as started:
        return prepare(sources, out, settings, jobs=options.jobs, started=started)


def _checked(sources: list[str], settings: Settings, options: Options) -> Report:
    from windlass.train.data.prepare.prepare import check

    with byte_progress("checking", not options.as_json) as started:
        return check(sources, settings, jobs=options.jobs, started=started)


def _show(report: Report, out: Path | None, options: Options) -> None:
    if options.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
        return
    from windlass.cli.train.data_table import show_report

    show_report(report, out)


def _verify(folders: list[Path], options: Options) -> int:
    from windlass.train.data.shards import damages, read_manifest

    manifests = [read_manifest(folder) for folder in folders]
    total = sum(stored.num_bytes for manifest in manifests for shard in manifest.shards for stored in shard.files.values())
    with byte_progress("verifying", not options.as_json) as started:
        seen = started(total)
        found = [line for folder, manifest in zip(folders, manifests, strict=True) for line in damages(folder, manifest, seen)]
    if options.as_json:
        sys.stdout.write(msgspec.json.encode({"damaged": found, "bytes": total}).decode() + "\n")
    for line in () if options.as_json else found:
        print(f"windlass: {line}", file=sys.stderr)
    if not found and not options.as_json:
        print(f"{sum(len(manifest.shards) for manifest in manifests)} shards are what was written")
    return DAMAGED if found else 0
