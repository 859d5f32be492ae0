"""Options of how a model is opened: the same for every command, and one Launch for what comes after."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import typer
import typer.main

import windlass.cli
from windlass.cli.options import ROWS, opens_model
from windlass.core.launch import Launch
from windlass.core.layout import Layout
from windlass.errors import BadInput

pytestmark = pytest.mark.pure

CLI = Path(windlass.cli.__file__).parent
SEEN: list[tuple[str, Launch]] = []


@opens_model
def command(name: str = typer.Argument(...), launch: Launch = typer.Option(), loud: bool = typer.Option(False, "--loud")) -> int:
    SEEN.append((name, launch))
    return 7 if loud else 0


def invoke(*words: str) -> tuple[int, Launch]:
    app = typer.Typer()
    app.command()(command)
    result = typer.main.get_command(app).main(args=list(words), standalone_mode=False)
    return result, SEEN[-1][1]


def test_nothing_said_is_a_launch_of_defaults() -> None:
    assert invoke("m") == (0, Launch())


def test_every_option_arrives() -> None:
    words = (
        "m --device cpu --kv fp32 --context 8k --exact --workers a:1,b --secret-file s --sync int8 --tp 6 --pp 1 --ep 3 --loud"
    )
    assert invoke(*words.split()) == (
        7,
        Launch(
            device="cpu", kv="fp32", context_tokens=8192, exact=True, workers=("a:1", "b"), secret_file="s", sync="int8",
            layout=Layout(tp=6, pp=1, ep=3),
        ),
    )  # fmt: skip


def test_answers_that_do_not_depend_on_the_batch_are_asked_for_or_refused() -> None:
    assert invoke("m", "--deterministic") == (0, Launch(deterministic=True))
    for words in (("--device", "cuda"), ("--tp", "2", "--sync", "int8")):
        with pytest.raises(BadInput, match="--deterministic"):
            invoke("m", "--deterministic", *words)


def test_a_contradiction_is_refused_before_the_command_runs() -> None:
    before = len(SEEN)
    with pytest.raises(BadInput, match="--workers needs --secret-file"):
        invoke("m", "--workers", "a")
    assert len(SEEN) == before


def test_every_row_is_a_field_of_launch_or_makes_one() -> None:
    fields = {field.name for field in msgspec.structs.fields(Launch)}
    made = {"context": "context_tokens", "tp": "layout", "pp": "layout", "ep": "layout"}
    assert {made.get(name, name) for name in ROWS} <= fields


def test_options_whose_placeholder_is_their_name_say_how_they_are_spelled() -> None:
    """Typer 0.27 takes `port: int = typer.Option(8000, metavar="PORT")` for an option --PORT."""
    found = [
        f"{file.name}: {argument.arg}"
        for file in CLI.rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef)
        for argument, default in _defaults(function)
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "typer.Option"
        if any(
            word.arg == "metavar" and ast.unparse(word.value).strip("'\"").lower() == argument.arg for word in default.keywords
        )
        if not any(ast.unparse(given).strip("'\"").startswith("--") for given in default.args)
    ]
    assert not found


def _defaults(function: ast.FunctionDef) -> Iterator[tuple[ast.arg, ast.expr]]:
    given = function.args.args
    return zip(given[len(given) - len(function.args.defaults) :], function.args.defaults, strict=True)
