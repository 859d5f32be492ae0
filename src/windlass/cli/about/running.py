"""`windlass ps` and `windlass stop`: the commands of this user that run on this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, cast

from rich.table import Table

from windlass.cli.console import console
from windlass.errors import BadInput, Error, UnknownName
from windlass.runtime.machine.processes import RunningCommand, running_commands
from windlass.units import format_bytes, format_seconds

LONG_RUNNING = ("serve", "run", "worker", "bench", "eval", "train", "convert", "launch")
STOP_SECONDS = 60.0
"""A server gets 30 seconds by default to finish its requests."""

Parse = Callable[[tuple[str, ...]], dict[str, Any]]
"""Arguments of a command -> its parameters by name."""


def rows(commands: list[RunningCommand], parse: Parse) -> list[dict[str, Any]]:
    return [_row(command, parse(command.arguments)) for command in commands if command.arguments[0] in LONG_RUNNING]


def _row(command: RunningCommand, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "pid": command.pid,
        "command": command.arguments[0],
        "model": _model(parameters),
        "url": _url(parameters) if command.arguments[0] == "serve" else None,
        "memory_bytes": command.memory_bytes,
        "started": command.started,
    }


def _model(parameters: dict[str, Any]) -> str:
    found = next((parameters[key] for key in ("model", "models", "source", "recipe") if parameters.get(key)), "")
    return ", ".join(map(str, cast(list[Any], found))) if isinstance(found, list | tuple) else str(found)


def _url(parameters: dict[str, Any]) -> str | None:
    host, port = parameters.get("host"), parameters.get("port")
    if not port:
        return None
    scheme = "https" if parameters.get("tls_cert") else "http"
    return f"{scheme}://{'127.0.0.1' if host in ('0.0.0.0', '::', None) else host}:{port}"


def show(parse: Parse, as_json: bool) -> None:
    found = rows(running_commands(), parse)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    console().print(_table(found) if found else "nothing runs; `windlass serve MODEL` starts a server")


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("pid", "command", "model", "memory", "for", "at"):
        table.add_column(name, justify="right" if name in ("pid", "memory", "for") else "left")
    for row in found:
        since = format_seconds(max(time.time() - row["started"], 0.0))
        table.add_row(str(row["pid"]), row["command"], row["model"], format_bytes(row["memory_bytes"]), since, row["url"] or "")
    return table


def chosen(found: list[dict[str, Any]], wanted: str) -> list[int]:
    """Pids of what is to be stopped: a pid, a model, or `all`."""
    if wanted == "all":
        return [row["pid"] for row in found]
    pids = [row["pid"] for row in found if wanted in (str(row["pid"]), row["model"], row["model"].rsplit("/", 1)[-1])]
    if not pids and not found:
        raise BadInput("nothing runs that could be stopped")
    if not pids:
        raise UnknownName("running model or pid", wanted, [row["model"] for row in found] + [str(row["pid"]) for row in found])
    return pids


def stop(wanted: str, parse: Parse, wait_seconds: float = STOP_SECONDS) -> None:
    """SIGTERM: a server finishes its running requests first. Waits until they are gone."""
    pids = chosen(rows(running_commands(), parse), wanted)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + wait_seconds
    left = pids
    while left and time.monotonic() < end:
        left = [pid for pid in left if any(command.pid == pid for command in running_commands())]
        time.sleep(0.1 if left else 0)
    if left:
        raise Error(f"{', '.join(map(str, left))} did not end within {wait_seconds:.0f} s; `kill -9 PID` ends it at once")
    sys.stdout.write(f"stopped {', '.join(map(str, pids))}\n")
