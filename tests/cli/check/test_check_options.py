"""Options of `windlass check` that would do nothing are refused; what it prints can be read at 80 columns."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from windlass.cli import execute
from windlass.cli.check.run import _monitor
from windlass.cli.check.table import table
from windlass.errors import BadInput
from windlass.runtime.machine.health.disk_check import disk_room
from windlass.tasks.check.model.generation import GenerationFacts
from windlass.tasks.check.report import Report, failed, passed

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINDLASS_DATA", raising=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--shared /data", "--shared does nothing without --hosts"),
        ("--ports 29500", "without --hosts"),
        ("tiny-glm --tasks lists", "--tasks does nothing without --full"),
        ("tiny-glm --examples 10", "without --full"),
        ("--full --tasks lists", "--tasks is for a model"),
        ("recipe.toml --quant int4", "--quant is for a model"),
        ("tiny-glm --full --tasks lists --random-weights", "use one of them"),
        ("--quick --full", "contradict"),
        ("tiny-glm --full --tasks listz", "did you mean lists"),
        ("tiny-glm --full --tasks gsm8k", "the data of task gsm8k is not on this machine"),
        ("--monitor http://127.0.0.1:99999/", "no address"),
        ("--monitor ftp://127.0.0.1/", "no address"),
    ],
)
def test_refused(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["check", *words.split()]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.err.count("\n") == 1 and printed.out == ""


class _Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/query?query=up" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_query_of_a_monitors_address_is_sent() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        at = f"http://127.0.0.1:{server.server_port}"
        assert _monitor(f"{at}/query?query=up")[0].state == "pass" and _monitor(f"{at}/query")[0].state == "fail"
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(BadInput, match="no address"):
        _monitor("http://127.0.0.1:port/")


REPORT = Report(
    checks=(
        passed("locked memory", "8 MiB", "little"),
        failed(
            "environment",
            "NCCL_SOCKET_IFNAM=eth0_of_a_rather_long_name",
            "names that exist",
            "meant is perhaps NCCL_SOCKET_IFNAME",
        ),
    )
)


@pytest.mark.parametrize("width", [60, 80, 119])
def test_nothing_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table(REPORT, width))
    lines = captured.get().splitlines()
    text = " ".join(captured.get().split())
    assert max(map(len, lines)) <= width and "…" not in text
    assert "locked memory pass 8 MiB environment fail NCCL_SOCKET_IFNAM=eth0" in text
    assert "needed: names that exist do: meant is perhaps NCCL_SOCKET_IFNAME" in text


def test_a_wide_terminal_has_a_column_for_each() -> None:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table(REPORT, 160))
    assert captured.get().splitlines()[0].split() == ["check", "state", "measured", "needed", "what", "to", "do"]
    assert len(captured.get().splitlines()) == 3


def test_a_rehearsal_that_fails_is_a_row_beside_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of loading and measuring before it are still worth reading."""
    facts = GenerationFacts(
        load_seconds=1.0, logprobs=(-0.5,) * 9, vocab_size=99, num_prompt_tokens=9, prefill_seconds=0.1, decode_seconds=0.01
    )

    def rehearse(*given: object) -> None:
        raise BadInput("the short evaluation failed: no room")

    monkeypatch.setattr("windlass.cli.run.session.ready_client", lambda launch, shown: nullcontext())
    monkeypatch.setattr("windlass.cli.check.model._generate", lambda *given: facts)
    monkeypatch.setattr("windlass.cli.check.model.rehearse", rehearse)
    monkeypatch.setattr("windlass.runtime.machine.health.disk_check.measure_disk", disk_room)
    assert execute(["check", "tiny-glm", "--full", "--tasks", "lists", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    bad = [row for row in report["checks"] if row["state"] == "fail"]
    assert [row["name"] for row in bad] == ["evaluation"] and bad[0]["measured"] == "the short evaluation failed: no room"
    assert {"load", "speed"} <= {row["name"] for row in report["checks"]} and report["estimates"] == {}
