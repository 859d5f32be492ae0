"""Everything at once: a server under load, a training run, a machine with simulated GPUs, a fleet of three, watched by real Prometheus and
Alertmanager, whose alerts come to a webhook here."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
for folder in (TESTS, TESTS / "tasks" / "serve"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from fake import FakeClient  # noqa: E402
from serving import Running as RunningServer  # noqa: E402
from serving import running  # noqa: E402

from free_ports import free_port  # noqa: E402
from waiting import HUNG_SECONDS  # noqa: E402
from windlass.core.metrics import serving as serving_metrics  # noqa: E402
from windlass.core.metrics.metric import Metric  # noqa: E402
from windlass.tasks.observe.http import TextServer  # noqa: E402
from windlass.tasks.observe.node.exporter import NodeExporter  # noqa: E402
from windlass.tasks.observe.node.nvidia import NvidiaGpus  # noqa: E402
from windlass.tasks.observe.node.simulated import SimulatedNvml  # noqa: E402
from windlass.tasks.observe.render.files import stack_files  # noqa: E402
from windlass.tasks.observe.render.rules import rules_file  # noqa: E402
from windlass.tasks.observe.render.targets import Receivers, Stack, Targets  # noqa: E402
from windlass.tasks.observe.rules.rule import Group  # noqa: E402
from windlass.tasks.observe.stack import Running, find, programs, stop_all  # noqa: E402

PROMETHEUS, ALERTMANAGER = find(["prometheus"]), find(["alertmanager", "prometheus-alertmanager"])
MISSING = "Prometheus and Alertmanager are not installed (Debian: apt-get install prometheus prometheus-alertmanager)"


class FleetClient(FakeClient):
    """A model split over three hosts, whose ranks take their time in collectives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.requests = deque(maxlen=100)  # type: ignore[assignment] - a soak looks at memory, and would find these
        self.lost: set[str] = set()
        self._began = time.monotonic()

    def readings(self) -> dict[Metric, list[tuple[dict[str, str], float]]]:
        hosts, seconds = ("root", "b:9998", "c:9998"), time.monotonic() - self._began
        ranks = [({"rank": str(rank), "worker": host}, rank) for rank, host in enumerate(hosts)]
        m = serving_metrics
        return {
            m.WORKER_UP: [({"worker": host}, float(host not in self.lost)) for host in hosts],
            m.WORKER_SHARE: [({"worker": host}, 1 / 3) for host in hosts],
            m.RANK_STEPS: [(labels, 50 * seconds) for labels, _ in ranks],
            m.RANK_STEP_SECONDS: [(labels, 0.9 * seconds) for labels, _ in ranks],
            m.RANK_COLLECTIVE_SECONDS: [
                ({**labels, "collective": "tp all_reduce", "group": "0"}, (0.1 + 0.01 * rank) * seconds) for labels, rank in ranks
            ],
            m.RANK_SENT_BYTES: [(labels, 1e6 * seconds) for labels, _ in ranks],
            m.RANK_RECEIVED_BYTES: [(labels, 1e6 * seconds) for labels, _ in ranks],
        }


class Webhook:
    """What Alertmanager posts: (alert, status, when)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, float]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in body["alerts"]:
                    outer.seen.append((alert["labels"]["alertname"], alert["status"], time.monotonic()))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def names(self, status: str) -> set[str]:
        return {name for name, found, _ in self.seen if found == status}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Run:
    """A training run's numbers, a step every `seconds`."""

    def __init__(self, seconds: float = 0.5) -> None:
        from windlass.tasks.train.logging import MetricsLogger
        from windlass.tasks.train.logging.prometheus import Prometheus
        from windlass.tasks.train.progress import RankTimes, StepReport

        self._report, self._times, self._seconds = StepReport, RankTimes, seconds
        self.sink = Prometheus(0)
        self._logger = MetricsLogger([self.sink], steps=100_000, flops_per_token=1e9, peak_flops=1e12)
        self.is_stalled = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._steps, daemon=True)
        self._thread.start()

    def _steps(self) -> None:
        self._logger.validation(0, 2.5)
        for step in range(1, 10**9):
            if self._stop.wait(self._seconds):
                return
            while self.is_stalled and not self._stop.wait(0.2):
                pass
            loads = [[10, 12, 9, 9]]
            report = self._report(
                step, 2.0 + 0.01 * (step % 5), 1.0, 1e-4, 4096, self._seconds, loads, {}, 0, True, self._ranks(step)
            )
            self._logger.step(step, report, 4096 * step)
            if step % 20 == 0:
                self._logger.event("checkpoint", step=step)

    def _ranks(self, step: int) -> tuple[Any, ...]:
        """Two that are alike: a fifth of the time in collectives."""
        seconds = step * self._seconds
        return tuple(
            self._times(rank, f"h{rank}", step, seconds, {"gradients": (0.2 + 0.01 * rank) * seconds}) for rank in (0, 1)
        )

    def bad_loss(self) -> None:
        self._logger.event("rollback", step=1, to_step=0, why="the loss is nan", loss=float("nan"))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._logger.close()


class Load:
    """Requests to the server, `at_once` at a time, each after the one before."""

    def __init__(self, url: str, at_once: int = 2, pause: float = 0.2) -> None:
        self._url, self.pause = url, pause
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.add(at_once)

    def add(self, number: int, pause: float | None = None) -> None:
        started = [threading.Thread(target=self._ask, args=(pause,), daemon=True) for _ in range(number)]
        self._threads += started
        for thread in started:
            thread.start()

    def _ask(self, pause: float | None) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}).encode()
        while not self._stop.wait(self.pause if pause is None else pause):
            request = urllib.request.Request(f"{self._url}/v1/chat/completions", body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=HUNG_SECONDS) as response:
                    response.read()
            except OSError:
                continue

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(HUNG_SECONDS)


class Rig:
    def __init__(
        self, folder: Path, server: RunningServer, groups: Sequence[Group], scrape_seconds: float, rules_text: str = ""
    ) -> None:
        self.folder, self.server, self.client = folder, server, server.client
        self.hook, self.run, self.load = Webhook(), Run(), Load(server.url)
        self.nvml = SimulatedNvml(8)
        self.exporter = NodeExporter([NvidiaGpus(self.nvml)], budget_watts=1.0)
        self._stop = threading.Event()
        self._sampling = threading.Thread(target=self.exporter.run, args=(self._stop,), daemon=True)
        self._sampling.start()
        self.node = TextServer("127.0.0.1", 0, {"/metrics": self.node_text})
        self.disk_full = False
        self.stack = Stack(
            targets=Targets(
                serve=(server.url.removeprefix("http://"),),
                train=(f"127.0.0.1:{self.run.sink.port}",),
                node=(f"127.0.0.1:{self.node.port}",),
            ),
            receivers=Receivers(webhook=self.hook.url),
            prometheus=f"127.0.0.1:{free_port()}",
            alertmanager=f"127.0.0.1:{free_port()}",
            scrape_seconds=scrape_seconds,
        )
        for name, text in stack_files(self.stack, str(folder)).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "rules.yml").write_text(rules_text or rules_file(groups))
        self._running: list[Running] = []

    def node_text(self) -> str:
        """With the disk as full as a test says."""
        lines = self.exporter.text().splitlines()
        full = [f"{line.rpartition(' ')[0]} 1000" if line.startswith("node_filesystem_avail_bytes{") else line for line in lines]
        return "\n".join([*(full if self.disk_full else lines), ""])

    def start(self, quick: bool) -> None:
        """`quick`: Alertmanager sends at once instead of after seconds."""
        if quick:
            path = self.folder / "alertmanager.yml"
            text = path.read_text()
            for slow in ('"10s"', '"5s"', '"1m"'):
                text = text.replace(slow, '"100ms"')
            path.write_text(text)
        found, _ = programs(self.stack, self.folder)
        self._running = [Running(program, self.folder) for program in found if program.name != "Grafana"]
        self.until(lambda: self.query("up") != [], "Prometheus did not start")

    def query(self, expression: str) -> list[dict[str, Any]]:
        url = f"http://{self.stack.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=HUNG_SECONDS) as response:
                return json.loads(response.read())["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                return []
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except OSError:
            return []

    def firing(self) -> set[str]:
        return {row["metric"]["alertname"] for row in self.query('ALERTS{alertstate="firing"}')}

    def until(self, condition: Callable[[], bool], why: str, seconds: float = 240.0, every: float = 0.2) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, f"hung: {why}; {self._ends()}"
            time.sleep(every)
        return time.monotonic() - began

    def _ends(self) -> list[str]:
        return [f"{one.program.name}: {one.exit_code} {one.last_line()}" for one in self._running]

    def close(self) -> None:
        stop_all(self._running)
        self.load.close()
        self.run.close()
        self._stop.set()
        self._sampling.join()
        self.node.close()
        self.hook.close()


@contextmanager
def rig(folder: Path, groups: Sequence[Group], scrape_seconds: float = 1.0, quick: bool = True, **options: Any) -> Generator[Rig]:
    """`options`: of the server."""
    client_options = {"seconds": 0.01, "slots": 4}
    with running(lambda: FleetClient(**client_options), **{"max_waiting": 8, **options}) as server:
        server.log.lines = deque(maxlen=100)  # type: ignore[assignment]
        made = Rig(folder, server, groups, scrape_seconds)
        try:
            made.start(quick)
            yield made
        finally:
            made.close()


def shortened(groups: Sequence[Group], by: float) -> list[Group]:
    """The same rules with shorter holds, evaluated every second."""
    return [
        dataclasses.replace(
            group,
            interval_seconds=1.0,
            alerts=tuple(dataclasses.replace(alert, for_seconds=float(int(alert.for_seconds / by))) for alert in group.alerts),
        )
        for group in groups
    ]


def has_stack() -> bool:
    return PROMETHEUS is not None and ALERTMANAGER is not None and shutil.which("promtool") is not None
