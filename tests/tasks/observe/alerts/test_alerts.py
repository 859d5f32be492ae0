"""Alerts from one evaluation to the next, and how they reach people."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from waiting import until
from windlass.core.metrics.exposition import text_of
from windlass.core.metrics.serving import ENGINE_RESTARTS, ENGINE_UP
from windlass.core.metrics.watched import Watched
from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import write_atomically
from windlass.tasks.observe.alerts import notify
from windlass.tasks.observe.alerts.state import Change, filled, step
from windlass.tasks.observe.conditions.condition import latest
from windlass.tasks.observe.rules.rule import Alert
from windlass.tasks.observe.scrape import Source, Unreachable, http_source
from windlass.tasks.observe.watch import Watch

pytestmark = pytest.mark.pure
LABELS = (("gpu", "3"), ("instance", "a"))
RULE = Alert(
    name="Hot",
    condition=latest("x") > 1,
    for_seconds=30,
    severity="page",
    summary="GPU {{ $labels.gpu }}: {{ $value | humanizePercentage }}",
    action="Cool it.",
)


def test_pending_then_firing_then_resolved() -> None:
    active, changes = step({}, RULE, [(LABELS, 0.5)], 100.0)
    assert not changes and next(iter(active.values())).fired_at is None
    active, changes = step(active, RULE, [(LABELS, 0.6)], 131.0)
    assert (
        [change.kind for change in changes] == ["firing"]
        and changes[0].alert.summary == "GPU 3: 60%"
        and changes[0].alert.since == 100.0
    )
    active, changes = step(active, RULE, [(LABELS, 0.7)], 146.0)
    assert not changes
    active, changes = step(active, RULE, [], 161.0)
    assert [change.kind for change in changes] == ["resolved"] and not active


def test_what_did_not_last_says_nothing() -> None:
    active, _ = step({}, RULE, [(LABELS, 1.0)], 0.0)
    active, changes = step(active, RULE, [], 15.0)
    assert not active and not changes
    _, changes = step(active, RULE, [(LABELS, 1.0)], 31.0)
    assert not changes  # it begins anew


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ $value }}", "0.1235"), ("{{$value|humanize}}", "0.1235"), ("{{ $labels.nothing }}.", "."),
        ("{{ $value | humanizeDuration }}", "123.5 ms"), ("{{ $labels.instance }}", "a"),
    ],
)  # fmt: skip
def test_texts_are_filled_in(template: str, text: str) -> None:
    assert filled(template, LABELS, 0.12345) == text


def _change(kind: str = "firing") -> Change:
    active, changes = step({}, RULE, [(LABELS, 1.0)], 0.0)
    _, changes = step(active, RULE, [(LABELS, 1.0)], 40.0)
    return Change(kind=kind, alert=changes[0].alert, at=50.0)  # type: ignore[arg-type]


class Hook:
    """`failures`: how many posts it refuses first."""

    def __init__(self, failures: int = 0) -> None:
        self.bodies: list[dict[str, object]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                nonlocal failures
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                failures -= 1
                if failures < 0:
                    outer.bodies.append(body)
                self.send_response(200 if failures < 0 else 500)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


def test_a_webhook_gets_alertmanagers_json_also_after_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = Hook(failures=1)
    notifier = notify.webhook(hook.url)
    monkeypatch.setattr(notifier, "_pause", 0.01)
    try:
        notifier.send([_change(), _change("resolved")])
        until(lambda: len(hook.bodies) >= 2)
        firing = next(body for body in hook.bodies if body["status"] == "firing")
        (alert,) = firing["alerts"]  # type: ignore[misc]
        assert firing["version"] == "4" and alert["labels"] == {
            "alertname": "Hot",
            "severity": "page",
            "gpu": "3",
            "instance": "a",
        }
        assert alert["startsAt"] == "1970-01-01T00:00:00Z" and alert["annotations"]["action"] == "Cool it."
    finally:
        notifier.close()
        hook.close()


def test_an_address_that_does_not_answer_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    notifier = notify.webhook("http://127.0.0.1:1/")
    monkeypatch.setattr(notifier, "_pause", 0.001)
    for _ in range(300):
        notifier.send([_change()])
    until(lambda: notifier.num_lost >= 100)
    notifier.close()


def test_a_command_gets_the_text(tmp_path: Path) -> None:
    target = tmp_path / "mail"
    program = f"import sys; open({str(target)!r}, 'w').write(sys.stdin.read())"
    notifier = notify.command([sys.executable, "-c", program])
    notifier.send([_change()])
    until(lambda: target.is_file() and target.read_text())
    assert target.read_text() == "FIRING page: Hot\n  GPU 3: 100%\n  Cool it.\n"
    notifier.close()


@pytest.mark.parametrize(
    "make", [lambda: notify.webhook("ftp://x"), lambda: notify.command(["no-such-program-here"]), lambda: notify.command([])]
)
def test_ways_that_cannot_work_are_refused(make: object) -> None:
    with pytest.raises(BadInput):
        make()  # type: ignore[operator]


# --- a whole watch


class Server:
    """A source that tells of an engine, or does not answer."""

    def __init__(self) -> None:
        self.up, self.restarts, self.is_there, self.junk = 1.0, 0.0, True, ""

    def read(self) -> str:
        if not self.is_there:
            raise Unreachable("refused")
        return text_of([(ENGINE_UP, [({}, self.up)]), (ENGINE_RESTARTS, [({}, self.restarts)])]) + self.junk


def test_a_watch_fires_resolves_and_remembers(tmp_path: Path) -> None:
    now = 1_700_000_000.0
    server = Server()
    watch = Watch(
        [Source(job="windlass-serve", instance="a", read=server.read)],
        file=tmp_path / "history",
        write=write_atomically,
        clock=lambda: now,
    )
    said: list[tuple[str, str]] = []

    def ticks(number: int) -> None:
        nonlocal now
        for _ in range(number):
            now += 15
            said.extend((change.alert.name, change.kind) for change in watch.tick())

    ticks(20)
    assert said == []
    server.is_there = False
    ticks(6)
    assert said == [("WindlassServerDown", "firing")]
    server.is_there = True
    server.restarts += 1
    ticks(2)
    assert ("WindlassServerDown", "resolved") in said and ("WindlassEngineRestarted", "firing") in said
    watched = watch.watched()
    assert [row.name for row in watched.alerts] == ["WindlassEngineRestarted"]
    assert [row.name for row in watched.recent] == ["WindlassServerDown"]
    watch.close()
    again = Watch([], file=tmp_path / "history", write=write_atomically, clock=lambda: now)
    assert again.store.names("windlass_engine_up")
    again.close()


def test_what_a_watch_knows_travels_as_json() -> None:
    """A ratio of nothing to nothing is no point."""
    now = 1_700_000_000.0
    server = Server()
    server.junk = "windlass_time_to_first_token_seconds_count 0\nwindlass_time_to_first_token_seconds_sum 0\nwindlass_num_requests_running 2\n"
    watch = Watch([Source(job="windlass-serve", instance="a", read=server.read)], clock=lambda: now)
    for _ in range(4):
        now += 15
        watch.tick()
    watched = watch.watched()
    assert msgspec.json.decode(msgspec.json.encode(watched), type=Watched) == watched
    assert [row.title for row in watched.charts] == ["Requests running"]


def test_series_that_nobody_reads_are_not_kept() -> None:
    now = 0.0
    server = Server()
    server.junk = "".join(f'windlass_http_requests_total{{route="/{number}",status="200"}} 1\n' for number in range(5000))
    server.junk += "".join(f'windlass_time_to_first_token_seconds_bucket{{le="{bound}"}} 1\n' for bound in (0.1, 0.25, 2.5, 5.0))
    watch = Watch([Source(job="windlass-serve", instance="a", read=server.read)], clock=lambda: now)
    for now in range(15, 150, 15):  # noqa: B007 - the watch's clock
        watch.tick()
    assert watch.store.num_series < 40
    assert len(watch.store.names("windlass_time_to_first_token_seconds_bucket")) == 1


def test_an_address_may_be_a_url() -> None:
    assert http_source("j", "http://h:1/").instance == "h:1" and http_source("j", "h:1").instance == "h:1"
    with pytest.raises(Unreachable):
        http_source("j", "127.0.0.1:1").read()
