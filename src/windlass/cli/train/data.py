"""`windlass train data`: tokenizes documents to shards, with a quality report."""

from __future__ import annotations

from pathlib import Path

import typer

EXAMPLES = """Examples:

windlass train data ./books notes.jsonl ./shards --tokenizer ./GLM-4.5-Air --validation 0.01

windlass train data chats.jsonl ./shards --tokenizer ./GLM-4.5-Air --template chat.jinja

windlass train data ./books --tokenizer ./GLM-4.5-Air --check

windlass train data ./shards --verify"""


def data(
    paths: list[str] = typer.Argument(
        ..., metavar="SOURCES OUT", help="Text, .jsonl or .parquet files, or directories of them; then the output directory."
    ),
    tokenizer: str = typer.Option("", metavar="MODEL", help="Model with the tokenizer and chat template: a directory or .gguf."),
    validation: float = typer.Option(0.0, metavar="0.01", help="Fraction of documents to hold out for validation."),
    field: str = typer.Option("", metavar="NAME", help="Field with the text. Default: `messages` or `text`."),
    template: Path | None = typer.Option(None, metavar="FILE", help="Chat template file, instead of the tokenizer's."),
    longest: str = typer.Option("128k", metavar="128k", help="Report documents with more tokens than this."),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Skip and count unreadable records instead of stopping."),
    jobs: int = typer.Option(0, metavar="N", help="Worker processes; 0: one per core."),
    check: bool = typer.Option(False, "--check", help="Only report on the sources; nothing is written."),
    verify: bool = typer.Option(False, "--verify", help="Verify the checksums of existing shards."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Tokenize documents to shards for training. After an interruption, run the same command again to continue.

    Exit code 1: --check found unreadable records, or --verify found damage.
    """
    from windlass.cli.train.data_run import DataOptions, run

    options = DataOptions(
        tokenizer=tokenizer,
        validation=validation,
        field=field,
        template=template,
        longest=longest,
        skip_bad=skip_bad,
        jobs=jobs,
        check=check,
        verify=verify,
        as_json=as_json,
    )
    return run(paths, options)


data.__doc__ = f"{data.__doc__}\n\n{EXAMPLES}"
