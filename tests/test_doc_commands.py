"""Every `windlass ...` line of README and docs is one that the command line understands; those that need no GPU, network, server or file of
the reader's run, as typed."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = {"log.md"}
BLOCK = re.compile(r"^([ \t]*)```(?:sh|console|bash)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)

# Run here: they only compute. What they name must be known without the hub.
RUNNABLE = ("plan", "models", "devices", "version", "completion", "ps")
NEEDS_MORE = re.compile(r"--disk-folder|--gpu-memory|--save|--plot|\./|/|\.toml|pull|\brm\b|--train\b|--cloud")


def commands() -> list[tuple[str, str]]:
    """(page, command) of all code blocks, once each."""
    found: dict[str, str] = {}
    for page in PAGES:
        if page.name in HISTORY:
            continue
        for _, block in BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                text = line.strip().removeprefix("$ ")
                if text.startswith("windlass "):
                    found.setdefault(text, page.name)
    return [(page, text) for text, page in found.items()]


def words(text: str) -> list[str]:
    """Without comments, and without what a shell would do with the rest of the line."""
    found = shlex.split(text, comments=True)
    ends = [index for index, word in enumerate(found) if word in ("|", ">", "&", "&&", ";")]
    return found[1 : min(ends, default=len(found))]


@cache
def root() -> Any:
    import typer.main

    from windlass.cli.app import app

    return typer.main.get_command(app)


COMMANDS = commands()


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("page", "text"), COMMANDS, ids=[f"{page}:{index}" for index, (page, _) in enumerate(COMMANDS)])
def test_every_command_is_understood(page: str, text: str) -> None:
    """Options exist and take what is given; nothing is run."""
    command, arguments = root(), words(text)
    while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if type(command).__name__ == "_RunsByDefault":  # `windlass eval MODEL` is `windlass eval run MODEL`
        command = command.commands["run"]
    assert not (hasattr(command, "commands") and arguments and not arguments[0].startswith("-")), (
        f"{page}: no such command in `{text}`"
    )
    if "..." not in text and "--help" not in text:
        command.make_context(command.name, list(arguments), resilient_parsing=True)


def runs_here(text: str) -> bool:
    arguments = words(text)
    return bool(arguments) and arguments[0] in RUNNABLE and not NEEDS_MORE.search(" ".join(arguments[1:])) and "..." not in text


RUN = [(page, text) for page, text in COMMANDS if runs_here(text)]


@pytest.mark.parametrize(("page", "text"), RUN, ids=[text[9:60] for _, text in RUN])
def test_what_needs_nothing_else_runs_as_typed(page: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3 is an answer: it does not fit."""
    from windlass.cli import execute

    assert execute(words(text)) in (0, 3), capsys.readouterr().err


def test_enough_of_them_run() -> None:
    assert len(RUN) >= 12
    assert any(page == "README.md" for page, _ in RUN)


@pytest.mark.cpu
def test_the_first_answer_of_the_readme(capfd: pytest.CaptureFixture[str]) -> None:
    from windlass.cli import execute

    line = next(text for page, text in COMMANDS if page == "README.md" and text.startswith("windlass run tiny-glm"))
    pytest.importorskip("torch")
    assert execute([*words(line), "--max-tokens", "40"]) == 0
    assert capfd.readouterr().out.strip()
