"""The table of commands."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import typer
import typer.main

from windlass import __version__
from windlass.cli.about import command as about
from windlass.cli.bench import command as bench
from windlass.cli.check import command as check
from windlass.cli.convert import command as convert
from windlass.cli.eval import command as eval_command
from windlass.cli.fleet import worker
from windlass.cli.launch import command as launch
from windlass.cli.models import command as models
from windlass.cli.observe import command as observe
from windlass.cli.plan import command as plan
from windlass.cli.route import command as route
from windlass.cli.run import command as run_command
from windlass.cli.serve import command as serve
from windlass.cli.setup import command as setup
from windlass.cli.top import command as top
from windlass.cli.train import command as train
from windlass.errors import BadInput

app = typer.Typer(
    name="windlass",
    help="Plan, convert, run, serve, evaluate, route and train open-weight language models on the hardware you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        print(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def windlass(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit."),
) -> None:
    pass


app.command("plan")(plan.plan)
app.command("convert")(convert.convert)
app.command("run")(run_command.run)
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.command("check")(check.check)
app.command("check-agent", hidden=True)(check.agent)
app.command("worker")(worker.worker)
app.command("top")(top.top)
app.command("pull")(models.pull)
app.command("rm")(models.rm)
app.command("ps")(about.ps)
app.command("stop")(about.stop)
app.command("devices")(about.devices)
app.command("version")(about.version)
app.command("completion")(about.completion)
app.add_typer(eval_command.app, name="eval")
app.add_typer(route.app, name="route")
app.add_typer(launch.app, name="launch")
app.add_typer(models.app, name="models")
app.add_typer(observe.app, name="observe")
app.add_typer(setup.app, name="setup")
app.add_typer(train.app, name="train")


INTERRUPTED = 130
ELSEWHERE = {
    "list": "models", "ls": "models", "show": "models show", "search": "models", "chat": "run", "generate": "run", "ask": "run",
    "start": "serve", "server": "serve", "api": "serve", "download": "pull", "fetch": "pull", "remove": "rm", "delete": "rm",
    "kill": "stop", "quantize": "convert", "export": "convert", "benchmark": "bench", "evaluate": "eval", "test": "check", "doctor": "check",
    "finetune": "train run", "fine-tune": "train run", "gpus": "devices", "monitor": "top", "status": "ps",
}  # fmt: skip
"""What other tools call a command of ours."""


def _prepare_help(argv: list[str]) -> None:
    """What is needed only for help, and for a shell that completes a line."""
    if "_WINDLASS_COMPLETE" in os.environ:
        typer_completion: Any = import_module("typer.completion")
        typer_completion.completion_init()
    elif not argv or {"-h", "--help"} & set(argv) or argv == [argv[0]]:
        from windlass.cli.help import use_words

        use_words()


def _help_of(command: Any, argv: list[str]) -> str:
    """The help of the command that was typed, or the list of all where there is none of that name."""
    return f"windlass {argv[0]} --help" if argv and argv[0] in command.commands else "windlass --help"


def _called_elsewhere(argv: list[str]) -> str:
    """What to type instead of a command that is not there; empty: nothing is known."""
    words = [word for word in argv if not word.startswith("-")]
    if words and words[0] in ELSEWHERE:
        return f"no such command {words[0]!r}; it is `windlass {ELSEWHERE[words[0]]}` here"
    if words[:1] == ["models"] and len(words) > 1:
        return f"no such command {words[1]!r}; `windlass models show {words[1]}` shows one model, `windlass models` lists all"
    return ""


def invoke(argv: list[str]) -> int:
    """Runs a command; a usage error becomes BadInput, so that it is printed as one line."""
    command = typer.main.get_command(app)
    _prepare_help(argv)
    try:
        result = command.main(args=argv, prog_name="windlass", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as stop:  # Click's answer to a closed pipe is status 1; ours is above
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    except Exception as error:  # usage errors format their own message; others are raised
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        message = " ".join(str(usage()).split())
        if not message:  # no arguments: the help was printed
            return getattr(error, "exit_code", 2)
        if message.startswith("No such command") and (instead := _called_elsewhere(argv)):
            raise BadInput(instead) from None
        raise BadInput(f"{message} (see `{_help_of(command, argv)}`)") from None
    if result == INTERRUPTED:  # Typer turns Ctrl-C into an exit code
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0
