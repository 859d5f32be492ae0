"""Help texts say the truth: every option has one, and the options they name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from windlass.cli.app import app

pytestmark = pytest.mark.pure

OPTION = re.compile(r"(?<![\w=-])--[a-z][a-z-]*")


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        elif not command.hidden:
            yield " ".join((*words, name)), command


COMMANDS = dict(commands(get_command(app)))


def unquoted(text: str | None) -> str:
    """Without commands in backquotes, which may be others, and without examples."""
    return re.sub(r"`[^`]*`", "", (text or "").split("Examples:")[0])


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_are_named_exist(name: str) -> None:
    command = COMMANDS[name]
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    texts = [command.help, *(one.help for one in command.params)]
    assert {option for text in texts for option in OPTION.findall(unquoted(text))} <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    assert [one.opts for one in COMMANDS[name].params if not (one.help or "").strip()] == []
