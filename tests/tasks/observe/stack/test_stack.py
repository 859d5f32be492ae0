"""Real Prometheus and Alertmanager: every query has data, an alert travels to a webhook and resolves. Holds are shortened to seconds here;
`bench/observe/faults.py` measures the real ones."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from rig import ALERTMANAGER, MISSING, Rig, has_stack, rig, shortened

from free_ports import free_port
from waiting import HUNG_SECONDS, until
from windlass.runtime.machine.memory import process_tree
from windlass.tasks.observe.conditions.promql import promql
from windlass.tasks.observe.dashboards.boards import BOARDS
from windlass.tasks.observe.dashboards.panel import INSTANCES
from windlass.tasks.observe.render.files import stack_files
from windlass.tasks.observe.render.targets import Receivers, Stack, Targets
from windlass.tasks.observe.rules.all_rules import all_groups

pytestmark = [pytest.mark.multi, pytest.mark.skipif(not has_stack(), reason=MISSING)]

NEVER_HERE = re.compile(
    r"windlass:planned_|windlass_eval_|windlass_route_|windlass:route_|windlass_key_|windlass_grid_|windlass_model_energy|windlass_energy_joules"
    r"|windlass_model_(?:loaded|requests_waiting|loads|swaps)"
    r"|DCGM_\w+_(?:RATIO|CELSIUS|WATTS|ERROR|REPLAY_TOTAL|REMAP_FAILED|THROUGHPUT_TOTAL)\b"
)
"""No evaluation, router or keys in the rig, one model alone, and no counter of energy where the tests run."""


def test_files_pass_the_checks_of_their_programs(tmp_path: Path) -> None:
    stack = Stack(
        targets=Targets(serve=("a:8000",), train=("b:9100",), node=("a:9400", "b:9400"), key_file="/etc/key"),
        receivers=Receivers(webhook="http://127.0.0.1:9/hook", mail_to="me@example.org", smtp="mail:25"),
    )
    for name, text in stack_files(stack, str(tmp_path)).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    amtool = ["amtool", "check-config", "alertmanager.yml"]
    for command in (["promtool", "check", "config", "--syntax-only", "prometheus.yml"], amtool):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG_SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    routes = [
        "amtool",
        "config",
        "routes",
        "test",
        "--config.file=alertmanager.yml",
        "--verify.receivers=people",
        "severity=page",
    ]
    assert subprocess.run(routes, cwd=tmp_path, capture_output=True, timeout=HUNG_SECONDS, check=False).returncode == 0
    assert ALERTMANAGER is not None


def _dashboard_queries() -> list[str]:
    return [query.expr.replace("$__rate_interval", "1m") for board in BOARDS for panel in board.panels for query in panel.queries]


def _empty(rig: Rig) -> list[str]:
    queries = [query.replace(INSTANCES, 'instance=~".*"') for query in _dashboard_queries() if not NEVER_HERE.search(query)]
    return [query for query in queries if not rig.query(query)]


def _recordings_without_data(rig: Rig) -> list[str]:
    names = [(one.name, promql(one.condition)) for group in all_groups() for one in group.recordings]
    return [name for name, expr in names if not NEVER_HERE.search(expr) and not rig.query(name)]


@pytest.mark.long
def test_every_query_returns_data(tmp_path: Path) -> None:
    with rig(tmp_path, shortened(all_groups(), 60)) as made:
        made.until(
            lambda: not _empty(made) and not _recordings_without_data(made),
            "queries without data: " + str(_empty(made)),
            every=1.0,
        )
        for group in all_groups():
            for alert in group.alerts:
                made.query(promql(alert.condition))  # raises if Prometheus refuses it


def test_an_alert_travels_to_a_webhook_and_resolves(tmp_path: Path) -> None:
    with rig(tmp_path, shortened(all_groups(), 60)) as made:
        made.until(lambda: made.query("windlass_fleet_worker_up") != [], "no scrape")
        made.server.call(lambda: made.client.lost.add("b:9998"))
        made.until(lambda: "WindlassWorkerLost" in made.hook.names("firing"), "the alert did not arrive")
        made.server.call(lambda: made.client.lost.clear())
        made.until(lambda: "WindlassWorkerLost" in made.hook.names("resolved"), "it did not resolve")


EVERY_SECOND = """
import functools, windlass.cli
from windlass.tasks.observe.render import targets
targets.Stack = functools.partial(targets.Stack, scrape_seconds=1.0)
windlass.cli.main()
"""
"""The command line, with scrapes more often than by default."""


def test_up_starts_the_stack_and_ends_it(tmp_path: Path) -> None:
    """The command itself: Prometheus scrapes this machine's exporter, and Ctrl-C leaves no process."""
    prometheus, alertmanager = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-c",
        EVERY_SECOND,
        "observe",
        "up",
        "--dir",
        "here",
        "--prometheus",
        prometheus,
        "--alertmanager",
        alertmanager,
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: _scraped(prometheus), lambda: f"Prometheus did not start: {process.poll()}")
        children = [pid for pid in process_tree(process.pid) if pid != process.pid]
        assert len(children) >= 2
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HUNG_SECONDS)
    assert process.returncode == 0 and err == "" and f"http://{prometheus}" in out
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def _scraped(prometheus: str) -> bool:
    try:
        with urllib.request.urlopen(
            f"http://{prometheus}/api/v1/query?query=node_memory_MemTotal_bytes", timeout=HUNG_SECONDS
        ) as response:
            return bool(json.loads(response.read())["data"]["result"])
    except OSError:
        return False


def test_a_program_that_ends_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "windlass",
            "observe",
            "up",
            "--dir",
            "here",
            "--prometheus",
            address,
            "--alertmanager",
            f"127.0.0.1:{free_port()}",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG_SECONDS, check=False)
    assert done.returncode == 2 and "Prometheus ended with status" in done.stderr and done.stderr.count("\n") == 1
