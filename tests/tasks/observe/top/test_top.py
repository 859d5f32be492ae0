"""`windlass top`: lines for every width, keys, and what is read from servers and machines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from windlass.core.metrics.watched import AlertRow
from windlass.tasks.observe.node.exporter import NodeExporter
from windlass.tasks.observe.node.nvidia import NvidiaGpus
from windlass.tasks.observe.node.simulated import SimulatedNvml
from windlass.tasks.observe.scrape import Unreachable
from windlass.tasks.observe.top.draw import bar, curve, encodable, to_ansi, to_text, width_of
from windlass.tasks.observe.top.keys import pressed
from windlass.tasks.observe.top.reader import Address, TopReader
from windlass.tasks.observe.top.screen import Shown, chosen_requests, lines
from windlass.tasks.observe.top.view import GpuView, NodeView, RequestView, ServerView, TopView, TrainView

pytestmark = pytest.mark.pure


def _request(number: int, age: float, tokens: int, owner: str = "ann") -> RequestView:
    return RequestView(
        number=number,
        server="a:8000",
        age_seconds=age,
        state="running",
        prompt_tokens=5,
        tokens=tokens,
        tokens_per_second=tokens / age,
        owner=owner,
    )


SERVER = ServerView(
    name="a:8000",
    model="m",
    state="ready",
    running=2,
    waiting=1,
    kv=0.42,
    tokens_per_second=52.0,
    first_token_p50=0.2,
    first_token_p95=1.5,
    between_p50=0.02,
    watts=600.0,
    workers=[("root", "ready", 0.5), ("b", "lost", 0.5)],
)
GPU = GpuView(
    index="0", name="H200", use=0.9, memory_bytes=2**36, memory_total_bytes=2**37, celsius=90, watts=650, limit_watts=700, xid=79
)
VIEW = TopView(
    at=1_700_000_000.0,
    servers=[SERVER],
    nodes=[
        NodeView(name="n:9400", cpu=0.5, memory_bytes=2**33, memory_total_bytes=2**34, disk_left=0.02, gpus=[GPU]),
        NodeView(name="gone:9400", is_up=False, problem="connection refused"),
    ],
    runs=[TrainView(name="t:9100", step=500, steps=1000, loss=2.5, tokens_per_second=1e5, mfu=0.4, seconds_left=3600.0, checkpoint_age_seconds=60.0)],
    requests=[_request(1, 10.0, 100), _request(2, 5.0, 200, "bob"), _request(3, 20.0, 10)],
    alerts=[AlertRow(name="WindlassGpuXid", severity="page", state="firing", summary="GPU 0: XID 79", action="Reboot.", since=0.0)],
)  # fmt: skip
CURVES = {"tokens a:8000": [1.0, 2.0, 3.0], "loss t:9100": [3.0, 2.5], "watts n:9400 0": [1.0, 2.0]}


def _text(view: TopView = VIEW, shown: Shown | None = None, width: int = 100, height: int = 40) -> str:
    return "\n".join(to_text(line) for line in lines(view, CURVES, shown or Shown(), width, height))


def test_everything_is_shown() -> None:
    text = _text()
    for wanted in (
        "1 alert  ", "page WindlassGpuXid: GPU 0: XID 79", "server a:8000", "2 running", "1 waiting", "52", "KV [||||......] 42%",
        "first 200 ms, p95 1.5 s",
        "11.54 J/token", "host b  lost", "run t:9100", "step 500 of 1,000", "loss 2.5000", " left", "machine n:9400", "disk 2% left", "GPU 0",
        "650/700 W", "90 C", "XID 79", "gone:9400  does not answer: connection refused", "▁",
    ):  # fmt: skip
        assert wanted in text, (wanted, text)


@given(st.integers(20, 200), st.integers(4, 60), st.booleans())
def test_it_fits_any_terminal(width: int, height: int, plain: bool) -> None:
    found = lines(VIEW, CURVES, Shown(is_plain=plain), width, height)
    assert 1 <= len(found) <= height and all(width_of(to_text(line)) <= width for line in found)


def test_in_80_by_24_requests_are_still_seen() -> None:
    many = replace(VIEW, requests=[_request(number, 100.0 - number, number) for number in range(1, 60)])
    text = _text(many, Shown(chosen=50), 80, 24)
    assert "request" in text and "      51 " in text and len(text.splitlines()) <= 24


def test_plain_text_has_words_only() -> None:
    text = _text(shown=Shown(is_plain=True))
    assert not set("▁▂▃▄▅▆▇█[]|") & set(text) and "KV 42%" in text


def test_what_a_server_says_cannot_move_the_cursor() -> None:
    evil = replace(VIEW, requests=[_request(1, 1.0, 1, "\x1b[2J\x07ann")])
    text = "".join(to_ansi(line) for line in lines(evil, {}, Shown(), 100, 40))
    assert "\x1b[2J" not in text and "\x07" not in text


@pytest.mark.parametrize(
    ("sort", "order"), [("age", [3, 1, 2]), ("tokens", [2, 1, 3]), ("speed", [2, 1, 3]), ("owner", [1, 3, 2])]
)
def test_requests_are_sorted(sort: str, order: list[int]) -> None:
    assert [row.number for row in chosen_requests(VIEW, Shown(sort=sort))] == order


def _press(keys: str | list[str], shown: Shown | None = None) -> tuple[Shown, Any]:
    found, action = shown or Shown(), ""
    for key in keys:
        found, action = pressed(key, found, VIEW)
    return found, action


def test_keys() -> None:
    assert _press("q")[1] == "quit" and _press("?")[0].is_help and not _press("??")[0].is_help
    assert _press(" ")[0].is_paused and _press("ss")[0].sort == "speed" and _press("+")[0].interval == 1.0
    assert _press(["/", "b", "o", "x", "backspace", "b", "enter"])[0].filter == "bob"
    assert [row.owner for row in chosen_requests(VIEW, Shown(filter="bob"))] == ["bob"]
    assert _press(["/", "q", "escape"])[0].filter == "" and _press(["down", "down", "down", "down"])[0].chosen == 2
    assert "sort requests" in _text(shown=Shown(is_help=True))


def test_a_request_is_cancelled_only_after_yes() -> None:
    asked, action = _press(["down", "k"])
    assert "Cancel request 1 of ann" in asked.question and asked.is_paused and action == ""
    assert _press("n", asked)[1] == "" and _press("q", asked)[1] == ""
    after, action = _press("y", asked)
    assert action == VIEW.requests[0] and not after.question and not after.is_paused
    assert pressed("k", Shown(), TopView(at=0.0))[0].message


def test_a_terminal_that_knows_ascii_only() -> None:
    assert encodable(curve([1, 2, 3], 10), "ascii") == "_=#"
    assert encodable("Zoë 模型 ▁", "ascii") == "Zo? ?? _" and encodable("Zoë ▁", "utf-8") == "Zoë ▁"
    assert encodable("Zoë ▁", "latin-1") == "Zoë _"


def test_bars_and_curves() -> None:
    assert bar(0.5, 4) == "[||..]" and bar(2.0, 4) == "[||||]" and bar(None, 2) == "[??]" and bar(0.5, 4, is_plain=True) == ""
    assert (
        curve([1, 2, 3], 10) == "▁▅█" and curve([5, 5], 10) == "▁▁" and curve([1], 10) == "" and len(curve(range(50), 10)) == 10
    )


# --- reading

STATUS = {
    "model": "m",
    "state": "ready",
    "now": {"running": 1, "tokens_per_second": 5.0, "kv_used": 0.1, "more": 1},
    "machine": {"energy_joules": 100.0},
    "workers": [],
}
ROWS = {
    "requests": [
        {
            "number": 7,
            "age_seconds": 1.0,
            "state": "running",
            "sequences": 1,
            "prompt_tokens": 3,
            "tokens": 4,
            "tokens_per_second": 4.0,
            "owner": "k",
        }
    ]
}
ALERT = {"name": "A", "severity": "page", "state": "firing", "summary": "s", "action": "a", "since": 1.0}
HISTORY = {"now": 1.0, "alerts": [ALERT, {**ALERT, "state": "pending"}], "recent": [], "charts": [], "left_out": []}
TRAIN = (
    "windlass_training_steps_total 9\nwindlass_training_step 9\nwindlass_training_planned_steps 10\nwindlass_training_loss NaN\n"
)


def _get(url: str, key: str) -> str:
    pages = {
        "http://s:1/metrics": "windlass_engine_up 1\n", "http://s:1/windlass/status": json.dumps(STATUS),
        "http://s:1/windlass/requests": json.dumps(ROWS),
        "http://s:1/windlass/history": json.dumps(HISTORY), "http://t:1/metrics": TRAIN,
    }  # fmt: skip
    if url not in pages:
        raise Unreachable("connection refused")
    return pages[url]


def test_servers_runs_and_machines_are_told_apart() -> None:
    now = iter(range(100, 200))
    exporter = NodeExporter([NvidiaGpus(SimulatedNvml(2))])
    addresses = [Address(url=f"http://{name}:1") for name in ("s", "t", "gone")]
    reader = TopReader(addresses, "", exporter, _get, lambda: float(next(now)))
    reader.read()
    view = reader.read()
    assert [server.model for server in view.servers] == ["m"] and [row.number for row in view.requests] == [7]
    assert [run.step for run in view.runs] == [9] and view.runs[0].loss is None
    assert [node.name for node in view.nodes] == ["this machine", "gone:1"] and len(view.nodes[0].gpus) == 2
    assert [row.name for row in view.alerts] == ["A"] and view.servers[0].watts == 0.0
    assert list(reader.curves["tokens s:1"]) == [5.0, 5.0]
    assert "not a number" in "\n".join(to_text(line) for line in lines(view, reader.curves, Shown(), 80, 24))


def test_cancelling_on_a_server_that_is_gone_says_why() -> None:
    reader = TopReader([Address(url="http://127.0.0.1:1")])
    assert reader.cancel("127.0.0.1:1", 5)
