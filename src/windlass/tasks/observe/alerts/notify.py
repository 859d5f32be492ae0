"""Alerts reach people: a webhook (Alertmanager's own JSON, so the same receivers understand it), a mail command, a desktop notice.

Sending happens in a thread with a short queue: an address that does not answer delays nobody, and what could not be sent is counted and retried.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from windlass.errors import BadInput
from windlass.tasks.observe.alerts.state import Change
from windlass.wire.client.url import open_url

TIMEOUT_SECONDS = 10.0
ATTEMPTS = 3
MAX_QUEUED = 100
NEVER = "0001-01-01T00:00:00Z"


class Notifier(Protocol):
    def send(self, changes: Sequence[Change]) -> None: ...
    def close(self) -> None: ...


Deliver = Callable[[Sequence[Change]], None]
"""Raises OSError or subprocess.SubprocessError if it did not arrive."""


class QueuedNotifier:
    def __init__(self, deliver: Deliver, pause_seconds: float = 2.0) -> None:
        self._deliver, self._pause = deliver, pause_seconds
        self._queue: queue.Queue[Sequence[Change] | None] = queue.Queue(MAX_QUEUED)
        self.num_sent = self.num_lost = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, changes: Sequence[Change]) -> None:
        try:
            self._queue.put_nowait(changes)
        except queue.Full:
            self.num_lost += len(changes)

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(TIMEOUT_SECONDS + 1)

    def _run(self) -> None:
        while (changes := self._next()) is not None:
            if self._delivered(changes):
                self.num_sent += len(changes)
            else:
                self.num_lost += len(changes)

    def _next(self) -> Sequence[Change] | None:
        """None: it is over. A full queue had no room for the mark that says so."""
        while not (self._stop.is_set() and self._queue.empty()):
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=0.5)
        return None

    def _delivered(self, changes: Sequence[Change]) -> bool:
        for attempt in range(ATTEMPTS):
            try:
                self._deliver(changes)
            except (OSError, subprocess.SubprocessError, ValueError):
                if attempt + 1 == ATTEMPTS or self._stop.wait(self._pause * 2**attempt):
                    return False
            else:
                return True
        return False


# --- ways ------------------------------------------------------------------------------------------------------------


def webhook(url: str) -> QueuedNotifier:
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"alerts cannot be posted to {url!r}; give a URL that begins with http:// or https://")

    def deliver(changes: Sequence[Change]) -> None:
        for kind in ("firing", "resolved"):
            chosen = [change for change in changes if change.kind == kind]
            if chosen:
                _post(url, msgspec.json.encode(webhook_body(chosen)))

    return QueuedNotifier(deliver)


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    with open_url(request, TIMEOUT_SECONDS):
        pass


def command(line: Sequence[str]) -> QueuedNotifier:
    """A program that gets the text on standard input, such as `mail -s Windlass me@example.org`."""
    if not line or shutil.which(line[0]) is None:
        raise BadInput(f"--mail {' '.join(line)}: there is no program {line[0] if line else ''!r}")

    def deliver(changes: Sequence[Change]) -> None:
        subprocess.run(list(line), input=text_of(changes).encode(), timeout=TIMEOUT_SECONDS, check=True, capture_output=True)

    return QueuedNotifier(deliver)


def desktop() -> QueuedNotifier:
    program = shutil.which("notify-send")
    if program is None:
        raise BadInput("--desktop needs notify-send (Debian: apt-get install libnotify-bin)")

    def deliver(changes: Sequence[Change]) -> None:
        for change in changes:
            title = f"{change.alert.name} ({change.kind})"
            subprocess.run([program, title, change.alert.summary], timeout=TIMEOUT_SECONDS, check=True, capture_output=True)

    return QueuedNotifier(deliver)


# --- pure ------------------------------------------------------------------------------------------------------------


def text_of(changes: Sequence[Change]) -> str:
    lines: list[str] = []
    for change in changes:
        alert = change.alert
        lines += [f"{change.kind.upper()} {alert.severity}: {alert.name}", f"  {alert.summary}", f"  {alert.action}", ""]
    return "\n".join(lines)


def webhook_body(changes: Sequence[Change]) -> dict[str, Any]:
    """Version 4 of Alertmanager's webhook (prometheus.io/docs/alerting/latest/configuration, webhook_config). One kind of change."""
    status = changes[0].kind
    return {
        "version": "4",
        "groupKey": "windlass",
        "status": status,
        "receiver": "windlass",
        "groupLabels": {},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "",
        "alerts": [_alert(change) for change in changes],
    }


def _alert(change: Change) -> dict[str, Any]:
    alert = change.alert
    return {
        "status": change.kind,
        "labels": {"alertname": alert.name, "severity": alert.severity, **dict(alert.labels)},
        "annotations": {"summary": alert.summary, "action": alert.action},
        "startsAt": _time(alert.since),
        "endsAt": _time(change.at) if change.kind == "resolved" else NEVER,
        "generatorURL": "",
        "fingerprint": hashlib.sha256(repr(alert.key).encode()).hexdigest()[:16],
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
