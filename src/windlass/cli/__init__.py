"""The command line: thin, imports on use. Turns every expected error into one line and an exit code."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from typing import NoReturn, TextIO

from windlass.errors import Error
from windlass.foreign import shown, shown_lines


def main(argv: list[str] | None = None) -> NoReturn:
    """Exit codes: 0 success, 2 bad input or impossible, 3 does not fit, 4 the engine failed, 130 interrupted."""
    code = execute(sys.argv[1:] if argv is None else argv)
    gc.freeze()  # or the interpreter searches all modules for garbage before it exits: 0.4 s where torch was imported
    sys.exit(code)


def execute(argv: list[str]) -> int:
    from windlass.cli.app import invoke

    _replace_unknown_letters(sys.stdout)
    if "HOME" not in os.environ:
        from windlass.runtime.machine.folders import ensure_home

        ensure_home()
    try:
        code = invoke(argv)
        sys.stdout.flush()
        return code
    except Error as error:
        print(f"windlass: {shown_lines(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("windlass: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader is gone (`| head`). Redirect stdout so that the interpreter's last flush does not fail.
        _silence_stdout()
        return 0
    except OSError as error:  # unexpected: a full disk under stdout, a folder that was removed
        where = f": {shown(error.filename)}" if error.filename else ""
        print(f"windlass: {shown(error.strerror or error)}{where}", file=sys.stderr)
        _silence_stdout()
        return 2


def _replace_unknown_letters(stream: TextIO) -> None:
    """A locale without a letter of some name, such as ASCII, is no reason to end."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")


def _silence_stdout() -> None:
    with contextlib.suppress(ValueError):  # a notebook's has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
