"""`windlass observe` and `windlass top` as commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from free_ports import free_port
from waiting import HUNG_SECONDS, until
from windlass.cli import execute
from windlass.cli.eval.metrics import Exported, exported, standing_text
from windlass.cli.top.terminal import keys_in
from windlass.core.metrics.exposition import read
from windlass.tasks.evaluate.run.progress import Silent, Standing

pytestmark = pytest.mark.pure


def test_render_writes_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("box1\nada@box2 address=10.0.0.8\n")
    (tmp_path / "key").write_text("secret\n")
    out = tmp_path / "out"
    command = [
        "observe",
        "render",
        str(out),
        "--hosts",
        str(hosts),
        "--serve",
        "a:8000",
        "--key",
        str(tmp_path / "key"),
        "--webhook",
        "http://h/x",
    ]
    assert execute(command) == 0
    listed = capsys.readouterr().out.split()
    assert {Path(name).name for name in listed} >= {
        "prometheus.yml",
        "rules.yml",
        "alertmanager.yml",
        "windlass-serve.json",
        "windlass.yaml",
    }
    text = (out / "prometheus.yml").read_text()
    assert '"box1:9400"' in text and '"10.0.0.8:9400"' in text and "credentials_file" in text and "secret" not in text
    assert '"http://h/x"' in (out / "alertmanager.yml").read_text()
    assert str(out) in (out / "grafana/provisioning/dashboards/windlass.yaml").read_text()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["observe", "render", "out", "--serve", "nonsense"], "HOST:PORT"),
        (["observe", "render", "out", "--first-token", "3"], "bound"),
        (["observe", "render", "out", "--hosts", "missing"], "missing"),
        (["observe", "node", "--host", "0.0.0.0"], "--key"),
        (["observe", "node", "--region", "nowhere"], "region"),
        (["observe", "node", "--host-metrics", "maybe"], "auto, yes or no"),
        (["observe", "energy", "missing"], "log.jsonl"),
        (["top", "ftp://x"], "no address"),
        (["top", "--interval", "0.1"], "--interval"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    command: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert execute(command) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_top_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["top", "127.0.0.1:1", "--once"]) == 0
    assert "127.0.0.1:1  does not answer" in capsys.readouterr().out
    assert execute(["top", "127.0.0.1:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["is_up"] is False


def test_keys_that_come_together() -> None:
    assert keys_in(b"?k") == ["?", "k"] and keys_in(b"\x1b[A\x1b[Bq") == ["up", "down", "q"] and keys_in("ä".encode()) == ["ä"]


def _started(*command: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "windlass", *command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.multi
def test_a_node_serves_until_ctrl_c(tmp_path: Path) -> None:
    port = free_port()
    process = _started("observe", "node", "--simulate", "2", "--port", str(port), "--region", "FRA", cwd=tmp_path)
    try:
        assert process.stdout is not None
        assert "2 GPUs" in process.stdout.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HUNG_SECONDS) as response:
            names = {one.name for one in read(response.read().decode())}
        assert {"DCGM_FI_DEV_POWER_USAGE", "windlass_grid_intensity_grams_per_kwh", "windlass_node_energy_joules_total"} <= names
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HUNG_SECONDS)
    assert process.returncode == 0 and err == ""


@pytest.mark.multi
def test_up_watches_by_itself_and_keeps_a_history(tmp_path: Path) -> None:
    process = _started("observe", "up", "--own", "--dir", "here", "--serve", "127.0.0.1:1", cwd=tmp_path)
    try:
        assert process.stdout is not None
        assert "without Prometheus" in process.stdout.readline()
        history = tmp_path / "here" / "history"
        until(lambda: history.is_file() and history.stat().st_size > 200)
        assert (tmp_path / "here" / "prometheus.yml").is_file()
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=HUNG_SECONDS)
    assert process.returncode == 0 and err == ""


# --- eval

STANDING = Standing(
    num_done=8,
    num_total=20,
    num_correct=4,
    num_graded=6,
    num_failed=1,
    prompt_tokens=100,
    answer_tokens=50,
    seconds=10.0,
    num_new=8,
    usd=0.5,
)


def test_an_evaluation_in_numbers() -> None:
    found = {(one.name, *(value for _, value in one.labels)): one.value for one in read(standing_text(STANDING))}
    assert found["windlass_eval_questions",] == 20 and found["windlass_eval_left_seconds",] == 15.0
    assert {verdict: found["windlass_eval_answers_total", verdict] for verdict in ("correct", "wrong", "failed", "pending")} == {
        "correct": 4, "wrong": 2, "failed": 1, "pending": 1,
    }  # fmt: skip


def test_an_evaluation_over_http() -> None:
    said: list[str] = []

    class Noting(Silent):
        def note(self, line: str) -> None:
            said.append(line)

    with exported(Noting(), 0) as watcher:
        watcher.update(STANDING)
        url = said[0].removeprefix("metrics at ")
        with urllib.request.urlopen(url, timeout=HUNG_SECONDS) as response:
            assert b"windlass_eval_cost_usd 0.5" in response.read()
    with exported(Noting(), None) as plain:
        assert not isinstance(plain, Exported)
