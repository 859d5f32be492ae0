"""Prometheus, Alertmanager and Grafana as processes: those that are installed are started with our files, watched and ended with us."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from windlass.core.model import Frozen
from windlass.tasks.observe.render.files import ALERTMANAGER, GRAFANA, PROMETHEUS
from windlass.tasks.observe.render.targets import Stack

STOP_SECONDS = 10.0
GRAFANA_HOMES = ("/usr/share/grafana", "/opt/grafana", "/usr/local/share/grafana", "/opt/homebrew/opt/grafana/share/grafana")


class Program(Frozen):
    name: str
    command: tuple[str, ...]
    url: str
    environment: dict[str, str] = {}


def find(names: Sequence[str]) -> str | None:
    return next((found for name in names if (found := shutil.which(name)) is not None), None)


def programs(stack: Stack, folder: Path) -> tuple[list[Program], list[str]]:
    """Those that are installed, and the names of those that are not."""
    made = [_prometheus(stack, folder), _alertmanager(stack, folder), _grafana(stack, folder)]
    missing = [name for name, one in zip(("Prometheus", "Alertmanager", "Grafana"), made, strict=True) if one is None]
    return [one for one in made if one is not None], missing


def _prometheus(stack: Stack, folder: Path) -> Program | None:
    binary = find(["prometheus"])
    return None if binary is None else Program(
        name="Prometheus",
        command=(
            binary,
            f"--config.file={folder / PROMETHEUS}",
            f"--storage.tsdb.path={folder / 'data' / 'prometheus'}",
            f"--storage.tsdb.retention.time={stack.retention}",
            f"--web.listen-address={stack.prometheus}",
            "--web.enable-lifecycle",
        ),
        url=f"http://{stack.prometheus}",
    )  # fmt: skip


def _alertmanager(stack: Stack, folder: Path) -> Program | None:
    binary = find(["alertmanager", "prometheus-alertmanager"])
    return None if binary is None else Program(
        name="Alertmanager",
        command=(
            binary,
            f"--config.file={folder / ALERTMANAGER}",
            f"--storage.path={folder / 'data' / 'alertmanager'}",
            f"--web.listen-address={stack.alertmanager}",
            "--cluster.listen-address=",  # no gossip: there is one
        ),
        url=f"http://{stack.alertmanager}",
    )  # fmt: skip


def _grafana(stack: Stack, folder: Path) -> Program | None:
    binary = find(["grafana", "grafana-server"])
    home = next((place for place in GRAFANA_HOMES if Path(place).is_dir()), None)
    if binary is None or home is None:
        return None
    server = ("server",) if Path(binary).name == "grafana" else ()
    return Program(
        name="Grafana",
        command=(binary, *server, f"--homepath={home}"),
        url=f"http://127.0.0.1:{stack.grafana_port}",
        environment={
            "GF_SERVER_HTTP_ADDR": "127.0.0.1",
            "GF_SERVER_HTTP_PORT": str(stack.grafana_port),
            "GF_PATHS_PROVISIONING": str(folder / GRAFANA / "provisioning"),
            "GF_PATHS_DATA": str(folder / "data" / "grafana"),
            "GF_PATHS_LOGS": str(folder / "data" / "grafana" / "log"),
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        },
    )


class Running:
    """A started program; its output goes to a file."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self.log = folder / "data" / f"{program.name.lower()}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                program.command,
                stdout=stream,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **program.environment},
                cwd=folder,
            )

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return lines[-1] if lines else ""

    def stop(self) -> None:
        if self.exit_code is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def stop_all(running: Sequence[Running]) -> None:
    for one in reversed(running):
        one.stop()


def first_ended(running: Sequence[Running], seconds: float) -> Running | None:
    """Waits a while; returns one that has ended meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended = next((one for one in running if one.exit_code is not None), None)
        if ended is not None:
            return ended
        time.sleep(0.2)
    return None
