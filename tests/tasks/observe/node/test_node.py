"""The exporter: GPUs by a stand-in for NVML, the host from texts of /proc."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from waiting import HUNG_SECONDS
from windlass.core.hardware.energy import grid
from windlass.core.metrics.exposition import read
from windlass.core.metrics.vocabulary import METRICS
from windlass.errors import BadInput
from windlass.runtime.machine.energy import EnergyCounters, RaplMonitor
from windlass.tasks.observe.http import TextServer, is_own_host
from windlass.tasks.observe.node.amd import AmdGpus
from windlass.tasks.observe.node.exporter import NodeExporter
from windlass.tasks.observe.node.host import add_host, filesystems
from windlass.tasks.observe.node.nvidia import NvidiaGpus
from windlass.tasks.observe.node.readings import Readings
from windlass.tasks.observe.node.simulated import SimulatedNvml

pytestmark = pytest.mark.pure


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _exporter(num_gpus: int = 2) -> tuple[NodeExporter, SimulatedNvml, Clock]:
    clock = Clock()
    nvml = SimulatedNvml(num_gpus, clock, watts=lambda gpu, now: 100.0 * (gpu + 1))
    return (
        NodeExporter([NvidiaGpus(nvml)], grid=grid("FRA"), clock=clock, budget_watts=5.0, rapl=RaplMonitor(folder="/nowhere")),
        nvml,
        clock,
    )


def _values(exporter: NodeExporter, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(value for _, value in one.labels): one.value for one in read(exporter.text()) if one.name == name}


def _gpu(exporter: NodeExporter, name: str) -> dict[str, float]:
    return {dict(one.labels)["gpu"]: one.value for one in read(exporter.text()) if one.name == name}


def test_every_name_is_in_the_vocabulary() -> None:
    exporter, nvml, _ = _exporter()
    nvml.fail(0, 79)
    exporter.sample()
    names = {one.name for one in read(exporter.text())}
    assert names <= set(METRICS)
    assert {
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_FB_USED",
        "node_memory_MemTotal_bytes",
        "windlass_grid_intensity_grams_per_kwh",
    } <= names


def test_gpus_under_dcgms_names_and_units() -> None:
    exporter, _, clock = _exporter()
    exporter.sample()
    before = _gpu(exporter, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
    clock.now += 10
    exporter.sample()
    after = _gpu(exporter, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
    assert {gpu: after[gpu] - before[gpu] for gpu in after} == pytest.approx(
        {"0": 1e6, "1": 2e6}, rel=1e-6
    )  # 10 s at 100 and 200 W, in mJ
    assert _gpu(exporter, "DCGM_FI_DEV_POWER_USAGE") == {"0": 100.0, "1": 200.0}
    assert _gpu(exporter, "DCGM_FI_DEV_FB_USED") == {"0": 61440.0, "1": 61440.0}
    assert _values(exporter, "windlass_node_energy_joules_total")[("nvml",)] == pytest.approx(sum(after.values()) / 1000)


def test_xids_and_throttling_are_counted() -> None:
    exporter, nvml, clock = _exporter()
    exporter.sample()
    nvml.fail(1, 79)
    nvml.fail(1, 79)
    nvml.fail(0, 31)
    nvml.reasons[0] = 0x40 | 0x1
    clock.now += 3
    exporter.sample()
    assert _values(exporter, "windlass_gpu_xid_errors_total") == {("1", "79"): 2.0, ("0", "31"): 1.0}
    assert _gpu(exporter, "DCGM_FI_DEV_XID_ERRORS") == {"0": 31.0, "1": 79.0}
    throttled = _values(exporter, "windlass_gpu_throttled_seconds_total")
    assert throttled[("0", "hw_thermal")] == 3.0 and throttled[("1", "hw_thermal")] == 0.0 and ("0", "gpu_idle") not in throttled


class NotSupportedError(Exception):
    pass


def test_what_a_gpu_cannot_is_asked_once_and_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, nvml, _ = _exporter(1)
    asked: list[str] = []

    def unsupported(*_: Any) -> None:
        asked.append("ecc")
        raise NotSupportedError

    def broken(*_: Any) -> None:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEccErrors", unsupported)
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", broken)
    for _ in range(25):
        exporter.sample()
    assert len(asked) == 2  # corrected and uncorrected
    assert _gpu(exporter, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL") == {} and _gpu(exporter, "DCGM_FI_DEV_POWER_USAGE") == {}
    assert _values(exporter, "windlass_exporter_errors_total") == {("gpu",): 25.0}


def test_without_the_host() -> None:
    text = NodeExporter([], with_host=False).text()
    assert "node_" not in text.replace("windlass_node_", "") and "windlass_energy_budget_watts" in text


PROC = {
    "/proc/stat": "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 100 0 50 800 50 0 0 0 0 0\n",
    "/proc/loadavg": "1.50 1.0 0.5 1/100 1234",
    "/proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 400 kB\n",
    "/proc/self/mounts": "/dev/sda1 / ext4 rw 0 0\nproc /proc proc rw 0 0\n/dev/sda1 /again ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n",
    "/proc/diskstats": "8 0 sda 10 0 2000 0 5 0 4000 0 0 0 0\n8 1 sda1 1 0 1 0 1 0 1 0 0 0 0\n7 0 loop0 1 0 1 0 1 0 1 0\n",
    "/proc/net/dev": "Inter-| x\n face | y\n    lo: 5 0 0 0 0 0 0 0 5 0\n  eth0: 100 1 0 0 0 0 0 0 200 1 0 0\n",
}


def test_the_host_under_node_exporters_names() -> None:
    found = Readings()
    add_host(found, lambda path: PROC.get(path, ""))
    samples = {(one.name, *(value for _, value in one.labels)): one.value for one in read(found.text())}
    assert samples["node_memory_MemAvailable_bytes",] == 400 * 1024 and samples["node_load1",] == 1.5
    assert samples["node_disk_read_bytes_total", "sda"] == 2000 * 512 and ("node_disk_read_bytes_total", "sda1") not in samples
    assert (
        samples["node_network_transmit_bytes_total", "eth0"] == 200 and ("node_network_receive_bytes_total", "lo") not in samples
    )
    assert samples["node_cpu_seconds_total", "all", "idle"] > 0


def test_a_device_is_one_filesystem() -> None:
    assert filesystems(PROC["/proc/self/mounts"]) == [("/dev/sda1", "ext4", "/"), ("tmpfs", "tmpfs", "/tmp")]
    assert filesystems("/dev/sdb /with\\040space xfs rw 0 0\n") == [("/dev/sdb", "xfs", "/with space")]


def test_filesystems_in_memory_are_told_apart_by_their_place() -> None:
    """All have the same device; what programs write to can be full, the kernel's own cannot."""
    places = ("/dev/shm", "/tmp", "/tmp", "/sys/fs/cgroup", "/proc/acpi", "/run/credentials/a", "/system")
    found = filesystems("".join(f"tmpfs {place} tmpfs rw 0 0\n" for place in places))
    assert [place for _, _, place in found] == ["/dev/shm", "/tmp", "/system"]


def test_energy_counters_add_up() -> None:
    clock = Clock()
    counters = EnergyCounters(RaplMonitor(folder="/nowhere"), SimulatedNvml(2, clock, watts=lambda gpu, now: 50.0))
    clock.now += 100
    assert counters.joules() == pytest.approx(10_000, rel=1e-3) and counters.source == "nvml"


class FakeAmd:
    """As much of amdsmi as is asked for."""

    class AmdSmiTemperatureType:
        HOTSPOT = 1

    class AmdSmiTemperatureMetric:
        CURRENT = 0

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [0]

    def amdsmi_get_gpu_activity(self, gpu: int) -> dict[str, int]:
        return {"gfx_activity": 70}

    def amdsmi_get_gpu_vram_usage(self, gpu: int) -> dict[str, int]:
        return {"vram_total": 196_592, "vram_used": 1000}

    def amdsmi_get_temp_metric(self, gpu: int, kind: int, metric: int) -> int:
        return 61

    def amdsmi_get_power_info(self, gpu: int) -> dict[str, int]:
        return {"average_socket_power": 450}

    def amdsmi_get_energy_count(self, gpu: int) -> dict[str, float]:
        return {"energy_accumulator": 2_000_000, "counter_resolution": 15.0}


def test_amd_under_the_same_names() -> None:
    exporter = NodeExporter([AmdGpus(FakeAmd())], with_host=False, rapl=RaplMonitor(folder="/nowhere"))
    exporter.sample()
    assert _gpu(exporter, "DCGM_FI_DEV_POWER_USAGE") == {"0": 450.0} and _gpu(exporter, "DCGM_FI_DEV_FB_FREE") == {"0": 195_592.0}
    assert exporter.joules() == {"amdsmi": pytest.approx(30.0)}


# --- over HTTP


def _get(port: int, path: str, key: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=HUNG_SECONDS) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_others_need_the_key() -> None:
    server = TextServer("127.0.0.1", 0, {"/metrics": lambda: "a 1\n"}, key="secret-key")
    try:
        assert _get(server.port, "/metrics")[0] == 401 and _get(server.port, "/metrics", "wrong")[0] == 401
        assert _get(server.port, "/metrics", "secret-key") == (200, "a 1\n")
        assert _get(server.port, "/health")[0] == 200 and _get(server.port, "/else", "secret-key")[0] == 404
    finally:
        server.close()


@pytest.mark.parametrize(
    ("header", "is_own"),
    [
        ("localhost:9400", True), ("127.0.0.1:9400", True), ("[::1]:9400", True), ("10.0.0.7", True), ("Node7:9400", True),
        ("node7.cluster", True), ("LOCALHOST.", True), ("evil.example", False), ("evil.example:9400", False), ("node7.evil.example", False),
        ("127.0.0.1.evil.example", False), ("", False), ("[::1", False), ("a@localhost.evil.example", False), ("localhost:9400x", True),
    ],
)  # fmt: skip
def test_own_names(header: str, is_own: bool) -> None:
    assert is_own_host(header, "127.0.0.1", has_key=False, machine="Node7.cluster") == is_own


def test_with_a_key_the_machine_may_have_any_domain() -> None:
    assert is_own_host("node7.site.example", "0.0.0.0", has_key=True, machine="node7")
    assert not is_own_host("other.site.example", "0.0.0.0", has_key=True, machine="node7")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("Host: evil.example:9400\r\n", 403),
        ("Host: localhost\r\nHost: evil.example\r\n", 400),
        ("", 400),
        ("Host: localhost\r\n", 200),
    ],
)
def test_a_foreign_name_is_not_answered(lines: str, status: int) -> None:
    """Another site's page can point its name at this machine; /health says nothing to it, either."""
    server = TextServer("127.0.0.1", 0, {"/metrics": lambda: "a 1\n"})
    try:
        for path in ("/metrics", "/health"):
            with socket.create_connection(("127.0.0.1", server.port), HUNG_SECONDS) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
            assert int(answer.split()[1]) == status and (b"a 1" in answer) == (status == 200 and path == "/metrics")
    finally:
        server.close()


def test_no_exporter_for_everybody_without_a_key() -> None:
    with pytest.raises(BadInput, match="--key"):
        TextServer("0.0.0.0", 0, {})


def test_it_samples_until_it_is_told_to_stop() -> None:
    exporter, _, _ = _exporter(1)
    stop = threading.Event()
    thread = threading.Thread(target=exporter.run, args=(stop, 0.01))
    thread.start()
    stop.set()
    thread.join(HUNG_SECONDS)
    assert not thread.is_alive() and _gpu(exporter, "DCGM_FI_DEV_GPU_TEMP")


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    from windlass.cli.observe.node import read_key

    (tmp_path / "key").write_text("abc\n")
    assert read_key(tmp_path / "key") == "abc" and read_key(None) == ""
    (tmp_path / "empty").write_text("")
    for bad in ("empty", "missing"):
        with pytest.raises(BadInput):
            read_key(tmp_path / bad)
