"""A view of everything as lines of a given width. Pure: what is shown follows from what was read and from the keys pressed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec

from windlass.tasks.observe.top.draw import Line, Piece, bar, curve, cut, join, level, padded
from windlass.tasks.observe.top.view import GpuView, NodeView, RequestView, ServerView, TopView, TrainView
from windlass.units import format_bytes, format_rate, format_seconds

SORTS = ("age", "tokens", "speed", "owner")
HELP = (
    "q       quit",
    "space   pause, and go on",
    "s       sort requests: age, tokens, speed, owner",
    "/       filter requests, models and machines by text; Enter ends, Esc clears",
    "up/down choose a request",
    "k       cancel the chosen request (asks first)",
    "+ -     read more often, less often",
    "?       this help",
)
Curves = Mapping[str, Iterable[float]]


class Shown(msgspec.Struct, frozen=True):
    """What the keys have chosen."""

    sort: str = "age"
    filter: str = ""
    is_paused: bool = False
    is_help: bool = False
    is_typing: bool = False
    chosen: int = 0
    """Index among the requests that are shown."""
    question: str = ""
    """Asked at the bottom: y or n."""
    message: str = ""
    interval: float = 2.0
    is_plain: bool = False


def lines(view: TopView, curves: Curves, shown: Shown, width: int, height: int) -> list[Line]:
    """At most `height` lines of at most `width` cells; requests get what room is left."""
    found: list[Line] = [_title(view, shown)]
    if shown.is_help:
        found.extend([(text, "")] for text in HELP)
    else:
        found += _alerts(view)
        found += _servers(view, curves, shown, width)
        found += _runs(view, curves, shown, width)
        found += _nodes(view, curves, shown, width)
        found += _requests(view, shown, max(height - len(found) - 1, 3))
    bottom = _bottom(shown)
    shown_lines = [*found[: height - 1], bottom] if bottom else found[:height]
    return [cut(line, width) for line in shown_lines]


def _title(view: TopView, shown: Shown) -> Line:
    clock = time.strftime("%H:%M:%S", time.localtime(view.at))
    parts = (("server", view.servers), ("run", view.runs), ("machine", view.nodes), ("request", view.requests))
    counts = "  ".join(_counted(len(found), what) for what, found in parts)
    firing: Piece = (_counted(len(view.alerts), "alert"), "bad") if view.alerts else ("no alerts", "dim")
    paused: Piece | None = ("PAUSED", "warn") if shown.is_paused else None
    return join([("windlass top", "bold"), (clock, ""), (counts, ""), firing, paused, ("? help", "dim")])


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _bottom(shown: Shown) -> Line:
    if shown.question:
        return [(f"{shown.question} (y/n) ", "warn")]
    if shown.is_typing:
        return [(f"filter: {shown.filter}_", "bold")]
    if shown.message:
        return [(shown.message, "warn")]
    return [(f"filter: {shown.filter}", "dim")] if shown.filter else []


def _alerts(view: TopView) -> list[Line]:
    rows: list[Line] = [[(f"! {row.severity} {row.name}: ", "bad"), (row.summary, "")] for row in view.alerts[:3]]
    return [*rows, [(f"! and {len(view.alerts) - 3} more", "bad")]] if len(view.alerts) > 3 else rows


def _fits(shown: Shown, *texts: str) -> bool:
    return not shown.filter or any(shown.filter.lower() in text.lower() for text in texts)


# --- servers


def _servers(view: TopView, curves: Curves, shown: Shown, width: int) -> list[Line]:
    found: list[Line] = []
    for server in view.servers:
        if _fits(shown, server.name, server.model):
            found += _server(server, curves, shown, width)
    return found


def _server(server: ServerView, curves: Curves, shown: Shown, width: int) -> list[Line]:
    if server.problem:
        return [join([(f"server {server.name}", "bold"), (server.problem, "bad")])]
    good = server.state == "ready"
    first = join(
        [
            (f"server {server.name}", "bold"),
            (server.state, "good" if good else "warn"),
            (f"{format_rate(server.tokens_per_second)} tokens/s", "bold"),
            (curve(curves.get(f"tokens {server.name}", ()), max(width - 90, 8), shown.is_plain), "good"),
            (f"{server.running} running", ""),
            (f"{server.waiting} waiting", "warn" if server.waiting else "dim"),
            (server.model, "") if width >= 110 else None,
        ]
    )
    named: list[Line] = [] if width >= 110 else [[(f"  {server.model}", "")]]
    return [first, *named, _server_details(server, shown), *_workers(server)]


def _server_details(server: ServerView, shown: Shown) -> Line:
    kv = f"KV {bar(server.kv, 10, shown.is_plain)} {server.kv:.0%}".replace("  ", " ")
    return join(
        [
            ("  " + kv, level(server.kv, 0.8, 0.95)),
            (f"prefix {server.prefix_hits:.0%}", ""),
            (f"first {_seconds(server.first_token_p50)}, p95 {_seconds(server.first_token_p95)}", "")
            if server.first_token_p50
            else None,
            (f"between {_seconds(server.between_p50)}", "") if server.between_p50 else None,
            (f"{server.watts:,.0f} W", "") if server.watts is not None else None,
            (f"{server.watts / server.tokens_per_second:,.2f} J/token", "")
            if server.watts is not None and server.tokens_per_second > 0
            else None,
            (f"offload {format_bytes(int(server.offload_bytes_per_second))}/s", "") if server.offload_bytes_per_second else None,
        ]
    )


def _workers(server: ServerView) -> list[Line]:
    return [
        join([(f"  host {name}", ""), (state, "bad" if state == "lost" else "good"), (f"{share:.0%} of the weights", "")])
        for name, state, share in server.workers
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


# --- runs


def _runs(view: TopView, curves: Curves, shown: Shown, width: int) -> list[Line]:
    return [line for run in view.runs if _fits(shown, run.name) for line in _run(run, curves, shown, width)]


def _run(run: TrainView, curves: Curves, shown: Shown, width: int) -> list[Line]:
    share = run.step / run.steps if run.steps else None
    steps = f"step {run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
    loss: Piece = ("loss is not a number", "bad") if run.loss is None else (f"loss {run.loss:.4f}", "bold")
    first = join(
        [
            (f"run {run.name}", "bold"),
            (steps, ""),
            (bar(share, 10, shown.is_plain), "good") if share is not None else None,
            loss,
            (curve(curves.get(f"loss {run.name}", ()), max(width - 60, 16), shown.is_plain), "good"),
        ]
    )
    second = join(
        [
            (f"  {format_rate(run.tokens_per_second)} tokens/s", "") if run.tokens_per_second is not None else None,
            (f"MFU {run.mfu:.1%}", "") if run.mfu is not None else None,
            (f"{format_seconds(run.seconds_left)} left", "") if run.seconds_left else None,
            (f"saved {format_seconds(run.checkpoint_age_seconds)} ago", "") if run.checkpoint_age_seconds is not None else None,
        ]
    )
    return [first, second]


# --- machines


def _nodes(view: TopView, curves: Curves, shown: Shown, width: int) -> list[Line]:
    found: list[Line] = []
    for node in view.nodes:
        if _fits(shown, node.name):
            found.append(_node(node, curves, shown))
            found += [_gpu(node, gpu, curves, shown, width) for gpu in node.gpus]
    return found


def _node(node: NodeView, curves: Curves, shown: Shown) -> Line:
    if not node.is_up:
        return join([(f"machine {node.name}", "bold"), (f"does not answer: {node.problem}", "bad")])
    memory = node.memory_bytes / node.memory_total_bytes if node.memory_total_bytes else None
    cpu = "" if node.cpu is None else f"CPU {bar(node.cpu, 6, shown.is_plain)} {node.cpu:.0%}".replace("  ", " ")
    held = "" if memory is None else f"memory {memory:.0%} of {format_bytes(int(node.memory_total_bytes))}"
    network = None
    if node.received_per_second is not None and node.sent_per_second is not None:
        network = f"net {format_bytes(int(node.received_per_second))}/s in, {format_bytes(int(node.sent_per_second))}/s out"
    return join(
        [
            (f"machine {node.name}", "bold"),
            (cpu, level(node.cpu, 0.9, 1.1)),
            (held, level(memory, 0.85, 0.95)),
            (f"disk {node.disk_left:.0%} left", "bad" if node.disk_left < 0.05 else "") if node.disk_left is not None else None,
            (network, "dim") if network else None,
        ]
    )


def _gpu(node: NodeView, gpu: GpuView, curves: Curves, shown: Shown, width: int) -> Line:
    share = gpu.watts / gpu.limit_watts if gpu.watts is not None and gpu.limit_watts else None
    memory = gpu.memory_bytes / gpu.memory_total_bytes if gpu.memory_total_bytes else None
    power = "" if gpu.watts is None else f"{gpu.watts:.0f}" + (f"/{gpu.limit_watts:.0f} W" if gpu.limit_watts else " W")
    return join(
        [
            (f"  GPU {gpu.index} {bar(share, 8, shown.is_plain)} {power}".replace("  W", " W"), level(share, 0.97, 1.1)),
            (f"XID {gpu.xid}", "bad") if gpu.xid else None,  # before all that a narrow terminal cuts off
            (curve(curves.get(f"watts {node.name} {gpu.index}", ()), max(width - 72, 8), shown.is_plain), "good"),
            (f"{gpu.celsius:.0f} C", level((gpu.celsius or 0) / 100, 0.8, 0.86)) if gpu.celsius is not None else None,
            (f"mem {bar(memory, 8, shown.is_plain)} {format_bytes(int(gpu.memory_bytes))}", level(memory, 0.95, 0.985)),
            (f"busy {gpu.use:.0%}", "dim") if gpu.use is not None else None,
        ],
        " ",
    )


# --- requests


def chosen_requests(view: TopView, shown: Shown) -> list[RequestView]:
    """In the order in which they are shown."""
    fitting = [one for one in view.requests if _fits(shown, one.owner, one.server, one.state, str(one.number))]
    return sorted(fitting, key=partial(_order, sort=shown.sort))


def _order(row: RequestView, sort: str) -> tuple[float, str]:
    match sort:
        case "age":
            return -row.age_seconds, ""
        case "tokens":
            return -row.tokens, ""
        case "speed":
            return -row.tokens_per_second, ""
        case _:
            return 0.0, row.owner


def _requests(view: TopView, shown: Shown, room: int) -> list[Line]:
    rows = chosen_requests(view, shown)
    if not rows:
        return [[("no requests" + (" that fit the filter" if shown.filter else ""), "dim")]] if view.servers else []
    head = f"{'request':>8} {'age':>8} {'state':<8} {'prompt':>7} {'tokens':>7} {'tokens/s':>8}  {'owner':<14} server  (by {shown.sort})"
    first = max(0, min(shown.chosen - room + 3, len(rows) - room + 2)) if len(rows) > room - 1 else 0
    visible = list(enumerate(rows))[first : first + max(room - 1, 1)]
    return [[(head, "head")], *(_request(row, index == shown.chosen) for index, row in visible)]


def _request(row: RequestView, is_chosen: bool) -> Line:
    text = (
        f"{row.number:>8} {format_seconds(row.age_seconds):>8} {row.state:<8} {row.prompt_tokens:>7,} {row.tokens:>7,} "
        f"{row.tokens_per_second:>8,.1f}  {padded(row.owner or '-', 14)} {row.server}"
    )
    return [(text, "pick" if is_chosen else "dim" if row.state == "waiting" else "")]
