"""`windlass train data`: documents to token shards, with a report on their quality."""

from __future__ import annotations

from pathlib import Path

import typer

EXAMPLES = """Examples:

windlass train data ./books notes.jsonl ./shards --tokenizer ./GLM-4.5-Air --validation 0.01

windlass train data chats.jsonl ./shards --tokenizer ./GLM-4.5-Air --template chat.jinja

windlass train data ./books --tokenizer ./GLM-4.5-Air --check

windlass train data ./shards --verify"""


def data(
    words: list[str] = typer.Argument(
        ..., metavar="SOURCES OUT", help="Text files, .jsonl, .parquet, or folders of them; then the output."
    ),
    tokenizer: str = typer.Option("", metavar="MODEL", help="Whose tokenizer and chat template: a model's directory or .gguf."),
    validation: float = typer.Option(0.0, metavar="0.01", help="Share of the documents to hold out."),
    field: str = typer.Option("", metavar="NAME", help="Where records have their text; else `messages` or `text`."),
    template: Path | None = typer.Option(None, metavar="FILE", help="A chat template, instead of the tokenizer's."),
    longest: str = typer.Option("128k", metavar="128k", help="Documents of more tokens are reported."),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Count records that cannot be read, instead of stopping."),
    jobs: int = typer.Option(0, metavar="N", help="Processes; 0 is one per core."),
    check: bool = typer.Option(False, "--check", help="Only report: every word is a source, and nothing is written."),
    verify: bool = typer.Option(
        False, "--verify", help="Compare shards with their checksums: every word is an output of before."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Check, tokenize and pack documents. Interrupted, it goes on where it was when the same command is given again.

    Exit code 1: --check found records that cannot be read, or --verify found damage.
    """
    from windlass.cli.train.data_run import Options, run

    options = Options(
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
    return run(words, options)


data.__doc__ = f"{data.__doc__}\n\n{EXAMPLES}"
