"""`windlass observe render` and `up`: options to files, and files to running programs or to our own watch."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.cli.observe.node import NodeOptions, make_exporter, read_key, stop_on_signals
from windlass.core.model import Frozen
from windlass.errors import BadInput

if TYPE_CHECKING:
    from windlass.core.plan import Plan
    from windlass.tasks.observe.alerts.notify import Notifier
    from windlass.tasks.observe.alerts.state import Change
    from windlass.tasks.observe.http import TextServer
    from windlass.tasks.observe.render.targets import Stack, Targets
    from windlass.tasks.observe.scrape import Source
    from windlass.tasks.observe.stack import Running


class StackOptions(Frozen):
    serve: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    evaluate: tuple[str, ...] = ()
    hosts: Path | None = None
    key: Path | None = None
    webhook: str = ""
    mail_to: str = ""
    smtp: str = ""
    mail: str = ""
    desktop: bool = False
    first_token: float = 2.5
    between_tokens: float = 0.2
    good_share: float = 0.99
    prometheus: str = "127.0.0.1:9090"
    alertmanager: str = "127.0.0.1:9093"
    own: bool = False
    plan: Path | None = None


def stack_of(options: StackOptions) -> Stack:
    from windlass.tasks.observe.render.targets import Receivers, Stack
    from windlass.tasks.observe.rules.rule import Objectives

    objectives = Objectives(
        first_token_seconds=options.first_token, between_tokens_seconds=options.between_tokens, good_share=options.good_share
    )
    receivers = Receivers(webhook=options.webhook, mail_to=options.mail_to, mail_from=options.mail_to, smtp=options.smtp)
    return Stack(
        targets=_targets(options),
        receivers=receivers,
        objectives=objectives,
        prometheus=options.prometheus,
        alertmanager=options.alertmanager,
        plan=_plan(options.plan),
    )


def _plan(file: Path | None) -> Plan | None:
    if file is None:
        return None
    from windlass.open.plan import read_plan

    return read_plan(file)


def _targets(options: StackOptions) -> Targets:
    from windlass.tasks.observe.render.targets import Targets

    return Targets(
        serve=tuple(map(_address, options.serve)),
        train=tuple(map(_address, options.train)),
        node=(*map(_address, options.node), *hosts_of(options.hosts)),
        evaluate=tuple(map(_address, options.evaluate)),
        key_file=str(options.key.expanduser().absolute()) if options.key else "",
    )


def _address(text: str) -> str:
    plain = text.removeprefix("http://").rstrip("/")
    host, _, port = plain.rpartition(":")
    if not host or not port.isdecimal() or "/" in plain:
        raise BadInput(f"{text!r} is no address; write HOST:PORT")
    return plain


def hosts_of(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    from windlass.tasks.launch.hostfile import join_address, parse_hostfile
    from windlass.tasks.observe.render.targets import NODE_PORT

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {file}: {error}") from None
    return tuple(join_address(host.reached_at, NODE_PORT) for host in parse_hostfile(text))


def write_files(folder: Path, options: StackOptions) -> int:
    for path in write_stack(folder, stack_of(options)):
        print(path)
    return 0


def write_stack(folder: Path, stack: Stack) -> list[Path]:
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.tasks.observe.render.files import stack_files

    written: list[Path] = []
    for name, text in stack_files(stack, str(folder.absolute())).items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot make {path.parent}: {error.strerror}") from None
        write_atomically(path, text.encode())
        written.append(path)
    return written


# --- up --------------------------------------------------------------------------------------------------------------


def bring_up(folder: Path, options: StackOptions) -> int:
    import msgspec

    stop = stop_on_signals()
    stack = stack_of(options)
    exporter = None
    if not stack.targets.node:
        exporter, address = _start_exporter(stop)
        stack = msgspec.structs.replace(stack, targets=msgspec.structs.replace(stack.targets, node=(address,)))
    write_stack(folder, stack)
    try:
        return _run(folder.absolute(), options, stack, stop)
    finally:
        stop.set()
        if exporter is not None:
            exporter.close()


def _start_exporter(stop: threading.Event) -> tuple[TextServer, str]:
    from windlass.tasks.observe.http import TextServer

    exporter = make_exporter(NodeOptions())
    exporter.sample()
    server = TextServer("127.0.0.1", 0, {"/metrics": exporter.text})
    threading.Thread(target=exporter.run, args=(stop,), daemon=True).start()
    return server, f"127.0.0.1:{server.port}"


def _run(folder: Path, options: StackOptions, stack: Stack, stop: threading.Event) -> int:
    from windlass.tasks.observe.stack import Running, programs, stop_all

    found, missing = programs(stack, folder)
    if options.own or "Prometheus" in missing:
        return _watch(folder, options, stack, stop)
    running: list[Running] = []
    try:
        for program in found:
            running.append(Running(program, folder))
            print(f"{program.name:<13} {program.url}", flush=True)
        for name in missing:
            print(f"{name:<13} is not installed; its files are in {folder}", flush=True)
        return _supervise(running, stop)
    finally:
        stop_all(running)


def _supervise(running: Sequence[Running], stop: threading.Event) -> int:
    from windlass.tasks.observe.stack import first_ended

    while not stop.is_set():
        ended = first_ended(running, 1.0)
        if ended is not None and not stop.is_set():
            raise BadInput(
                f"{ended.program.name} ended with status {ended.exit_code}: {ended.last_line()} (all of it: {ended.log})"
            )
    return 0


def _watch(folder: Path, options: StackOptions, stack: Stack, stop: threading.Event) -> int:
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.tasks.observe.watch import Watch

    watch = Watch(
        _sources(stack, options),
        objectives=stack.objectives,
        file=folder / "history",
        write=write_atomically,
        notifiers=_notifiers(options),
    )
    print(f"watching {', '.join(stack.targets.jobs)} without Prometheus; history in {folder / 'history'}", flush=True)
    try:
        _print_changes(watch.tick())
        while not stop.wait(15.0):
            _print_changes(watch.tick())
    finally:
        watch.close()
    return 0


def _print_changes(changes: Sequence[Change]) -> None:
    for change in changes:
        print(f"{change.kind:<8} {change.alert.severity:<6} {change.alert.name}: {change.alert.summary}", flush=True)


def _sources(stack: Stack, options: StackOptions) -> list[Source]:
    from windlass.tasks.observe.scrape import http_source

    key = read_key(options.key)
    return [http_source(job, address, key) for job, addresses in stack.targets.jobs.items() for address in addresses]


def _notifiers(options: StackOptions) -> list[Notifier]:
    from windlass.tasks.observe.alerts import notify

    found: list[Notifier] = []
    if options.webhook:
        found.append(notify.webhook(options.webhook))
    if options.mail:
        found.append(notify.command(shlex.split(options.mail)))
    if options.desktop:
        found.append(notify.desktop())
    return found
