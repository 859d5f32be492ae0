"""`windlass top` from its options to a screen that follows the keys."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.cli.observe.node import read_key
from windlass.core.model import Frozen
from windlass.errors import BadInput

if TYPE_CHECKING:
    from windlass.cli.top.terminal import Terminal
    from windlass.tasks.observe.top.reader import Address, TopReader
    from windlass.tasks.observe.top.screen import Shown
    from windlass.tasks.observe.top.view import RequestView, TopView

DEFAULT = "http://127.0.0.1:8000"
RATE_SECONDS = 0.5
"""Between the two readings of --once, so that there are rates."""


class TopOptions(Frozen):
    addresses: tuple[str, ...] = ()
    hosts: Path | None = None
    key: Path | None = None
    interval: float = 2.0
    once: bool = False
    as_json: bool = False
    plain: bool = False


def show(options: TopOptions) -> int:
    if options.interval < 0.5:
        raise BadInput(f"--interval is {options.interval:g}; it should be at least 0.5 seconds")
    reader = _reader(options)
    is_terminal = sys.stdout.isatty() and sys.stdin.isatty()
    if options.as_json or options.once or (options.plain and not is_terminal) or not is_terminal:
        return _print_once(reader, options)
    if options.plain:
        return _print_often(reader, options)
    from windlass.cli.top.terminal import Terminal

    with Terminal(has_color=not os.environ.get("NO_COLOR")) as terminal:
        _follow(reader, options, terminal)
    return 0


def _reader(options: TopOptions) -> TopReader:
    from windlass.tasks.observe.node.exporter import NodeExporter
    from windlass.tasks.observe.scrape import Unreachable, fetch
    from windlass.tasks.observe.top.reader import TopReader

    key = read_key(options.key)
    addresses = _addresses(options)
    if addresses:
        return TopReader(addresses, key)
    try:
        fetch(f"{DEFAULT}/health", key, 1.0)
    except Unreachable:
        return TopReader([], key, NodeExporter())
    return TopReader(_parsed([DEFAULT]), key, NodeExporter())


def _addresses(options: TopOptions) -> list[Address]:
    from windlass.cli.observe.stack import hosts_of

    return _parsed([*options.addresses, *hosts_of(options.hosts)])


def _parsed(texts: list[str]) -> list[Address]:
    from windlass.tasks.observe.top.reader import Address

    found: list[Address] = []
    for text in texts:
        url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1").removesuffix("/metrics")
        if not url.startswith(("http://", "https://")) or not url.partition("://")[2]:
            raise BadInput(f"{text!r} is no address; write HOST:PORT or a URL")
        found.append(Address(url=url))
    return found


def _print_once(reader: TopReader, options: TopOptions) -> int:
    reader.read()
    time.sleep(RATE_SECONDS)
    view = reader.read()
    if options.as_json:
        print(msgspec.json.encode(view).decode())
    else:
        print(_text(view, reader, shutil.get_terminal_size((100, 10_000)).columns, options))
    return 0


def _text(view: TopView, reader: TopReader, width: int, options: TopOptions) -> str:
    from windlass.tasks.observe.top.draw import encodable, to_text
    from windlass.tasks.observe.top.screen import Shown, lines

    found = lines(view, reader.curves, Shown(is_plain=options.plain), max(width, 40), 10_000)
    return encodable("\n".join(to_text(line) for line in found), sys.stdout.encoding)


def _print_often(reader: TopReader, options: TopOptions) -> int:
    """For screen readers: nothing moves, the next state is below the last."""
    while True:
        print(_text(reader.read(), reader, shutil.get_terminal_size().columns, options), end="\n\n", flush=True)
        time.sleep(max(options.interval, 5.0))


def _follow(reader: TopReader, options: TopOptions, terminal: Terminal) -> None:
    from windlass.tasks.observe.top.keys import pressed
    from windlass.tasks.observe.top.screen import Shown, lines

    shown = Shown(interval=options.interval)
    view, due = reader.read(), time.monotonic() + 0.7
    while True:
        width, height = terminal.size
        terminal.draw(lines(view, reader.curves, shown, width, height))
        key = terminal.key(max(due - time.monotonic(), 0.0))
        if key:
            shown, action = pressed(key, shown, view)
            if action == "quit":
                return
            if action:
                shown = _cancel(reader, shown, action)
        if time.monotonic() >= due:
            if not shown.is_paused:
                view = reader.read()
            due = time.monotonic() + shown.interval


def _cancel(reader: TopReader, shown: Shown, row: RequestView) -> Shown:
    problem = reader.cancel(row.server, row.number)
    said = f"request {row.number} was cancelled" if not problem else f"request {row.number} was not cancelled: {problem}"
    return msgspec.structs.replace(shown, message=said)
