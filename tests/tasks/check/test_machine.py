"""Verdicts on machines: each fault is found and named, and a machine that is well gives no alarm."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import healthy
from healthy import GIB

from waiting import HUNG_SECONDS
from windlass.runtime.machine.health import names
from windlass.runtime.machine.health.clock import board_ahead, clock_behind
from windlass.runtime.machine.health.disk_check import DiskFacts, disk_room, measure_disk, renames
from windlass.runtime.machine.health.gpus import GpuProcess, GpuReport, query_health
from windlass.runtime.machine.health.host import instruction_sets
from windlass.runtime.machine.health.kernel_log import Xid, parse_xids
from windlass.runtime.machine.health.names import name_problem, nameservers
from windlass.tasks.check.machine.disk import SharedFacts, judge_disk, judge_shared
from windlass.tasks.check.machine.facts import MachineFacts, judge_machine, read_machine
from windlass.tasks.check.machine.gpus import judge_gpus
from windlass.tasks.check.machine.host import FAR_SKEW_SECONDS, judge_alike, judge_host
from windlass.tasks.check.needs import Needs
from windlass.tasks.check.report import Check

pytestmark = pytest.mark.pure

NEEDS = Needs(num_gpus=8, gpu_bytes=70 * GIB, ram_bytes=500 * GIB, shm_bytes=GIB, num_machines=2)


def bad(rows: list[Check]) -> list[tuple[str, str]]:
    return [(row.name, row.state) for row in rows if row.state != "pass"]


def only(rows: list[Check]) -> Check:
    found = [row for row in rows if row.state != "pass"]
    assert len(found) == 1, found
    return found[0]


def test_a_healthy_machine_has_no_alarm() -> None:
    assert bad(judge_machine(healthy.machine(), NEEDS)) == []


GPU_FAULTS: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"free_bytes": 10 * GIB, "processes": (GpuProcess(pid=77, name="python3", used_bytes=69 * GIB),)},
        "gpu memory",
        "fail",
        "python3 (pid 77)",
    ),
    ({"uncorrected_errors": 2}, "ecc", "fail", "2 uncorrected"),
    ({"remap_failed": True}, "ecc", "fail", "remapping failed"),
    ({"remap_pending": True}, "ecc", "warn", "wait to be remapped"),
    ({"throttle_bits": 0x8}, "throttle", "warn", "hardware slowdown"),
    ({"throttle_bits": 0x40}, "throttle", "warn", "thermal"),
    ({"throttle_bits": 0x80}, "throttle", "warn", "power brake"),
    ({"celsius": 88}, "throttle", "warn", "88 C"),
    ({"power_limit_watts": 350.0}, "gpu clocks", "warn", "350 W of 700 W"),
    ({"link_width": 8}, "gpu clocks", "warn", "x8 of x16"),
]


@pytest.mark.parametrize(("changes", "name", "state", "says"), GPU_FAULTS)
def test_a_sick_gpu_is_named(changes: dict[str, Any], name: str, state: str, says: str) -> None:
    row = only(judge_gpus(healthy.gpus(**changes), NEEDS, "n1"))
    assert (row.name, row.state, row.host) == (name, state, "n1")
    assert says in row.measured and "GPU 3" in row.measured and row.remedy


@pytest.mark.parametrize("bits", [0x0, 0x1, 0x2, 0x4])
def test_idle_and_power_capped_gpus_are_well(bits: int) -> None:
    assert bad(judge_gpus(healthy.gpus(throttle_bits=bits), NEEDS)) == []


def test_xids_and_what_to_do() -> None:
    log = (
        "[1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.\n"
        "[2] NVRM: Xid (PCI:0000:3b:00): 79, again\n[3] NVRM: Xid (PCI:0000:5e:00): 43, harmless\n"
    )
    assert [(one.number, one.device) for one in parse_xids(log)] == [(79, "0000:3b:00")]
    facts = msgspec.structs.replace(healthy.gpus(), xids=parse_xids(log))
    row = only(judge_gpus(facts, NEEDS))
    assert row.state == "fail" and "XID 79" in row.measured and "reboot" in row.remedy
    program = msgspec.structs.replace(healthy.gpus(), xids=(Xid(number=31, device="x"),))
    assert only(judge_gpus(program, NEEDS)).state == "warn"


def test_missing_gpus_and_wrong_builds() -> None:
    assert only(judge_gpus(healthy.gpus(), Needs(num_gpus=9))).name == "gpus"
    assert only(judge_gpus(msgspec.structs.replace(healthy.gpus(), torch_gpus=0), NEEDS)).name == "gpus"
    assert only(judge_gpus(msgspec.structs.replace(healthy.gpus(), torch_cuda="13.0"), NEEDS)).name == "driver"
    lost = msgspec.structs.replace(healthy.gpus(), report=GpuReport(problem="NVML lost a GPU: GPU is lost"))
    assert "GPU is lost" in only(judge_gpus(lost, NEEDS)).measured


class NvmlError(Exception):
    pass


def fake_nvml(**answers: Any) -> Any:
    """A driver that supports little: everything else raises, as NVML does."""

    def refuse(*_: Any) -> Any:
        raise NvmlError("not supported")

    names = (
        "nvmlDeviceGetMemoryInfo nvmlDeviceGetRemappedRows nvmlDeviceGetPowerManagementLimit nvmlDeviceGetPowerManagementDefaultLimit "
        "nvmlDeviceGetName nvmlDeviceGetUUID nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetTotalEccErrors nvmlDeviceGetClockInfo "
        "nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetMaxClockInfo nvmlDeviceGetTemperature nvmlDeviceGetTemperatureThreshold "
        "nvmlDeviceGetCurrPcieLinkWidth nvmlDeviceGetMaxPcieLinkWidth nvmlSystemGetDriverVersion nvmlSystemGetCudaDriverVersion"
    ).split()
    calls = dict.fromkeys(names, refuse) | {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
    }
    calls |= {"nvmlDeviceGetHandleByIndex": lambda index: index}
    return SimpleNamespace(NVMLError=NvmlError, **{**calls, **answers})


def test_nvml_is_read() -> None:
    nvml = fake_nvml(
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=80 * GIB, free=79 * GIB),
        nvmlDeviceGetRemappedRows=lambda _: (0, 1, True, False),
        nvmlDeviceGetName=lambda _: b"NVIDIA H200",
        nvmlSystemGetCudaDriverVersion=lambda: 12080,
        nvmlDeviceGetCurrentClocksEventReasons=lambda _: 0x40,
    )
    report = query_health(nvml)
    assert report.cuda == "12.8" and report.gpus[0].name == "NVIDIA H200"
    assert report.gpus[0].remap_pending and report.gpus[0].throttle_bits == 0x40 and report.gpus[0].celsius is None


def test_nvml_that_lost_a_gpu_is_a_problem_not_a_traceback() -> None:
    def lost(_: int) -> Any:
        raise NvmlError("GPU is lost")

    assert "GPU is lost" in query_health(fake_nvml(nvmlDeviceGetHandleByIndex=lost)).problem
    assert "does not start" in query_health(fake_nvml(nvmlInit=lambda: lost(0))).problem


HOST_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"ram_free_bytes": GIB}, "ram", "fail"),
    ({"swap_used_bytes": 7 * GIB}, "swap", "warn"),
    ({"shm_free_bytes": 2**20}, "/dev/shm", "fail"),
    ({"max_locked_bytes": 2**23}, "locked memory", "warn"),
    ({"max_open_files": 256}, "open files", "warn"),
    ({"instructions": ()}, "cpu", "warn"),
    ({"quota_cores": 0.2}, "cpu", "warn"),
    ({"max_file_bytes": 2**20}, "file size", "warn"),
    ({"name_problem": "no answer from the name server 10.0.0.1"}, "names", "warn"),
    ({"clock_behind_seconds": 5 * 3600.0}, "clock", "fail"),
    ({"board_clock_ahead_seconds": -7200.0}, "clock", "warn"),
    ({"environment": {"NCCL_TREE_THRESHOLD": "0"}}, "environment", "warn"),
    ({"environment": {"NCCL_TIMEOUT": "1800"}}, "environment", "warn"),
    ({"environment": {"NCCL_SOCKET_IFNAM": "eth0"}}, "environment", "warn"),
]


@pytest.mark.parametrize(("changes", "name", "state"), HOST_FAULTS)
def test_a_machine_that_lacks_something_is_named(changes: dict[str, Any], name: str, state: str) -> None:
    row = only(judge_host(healthy.host(**changes), NEEDS, has_rdma=True))
    assert (row.name, row.state) == (name, state) and row.remedy


def test_limits_that_do_no_harm() -> None:
    harmless: list[dict[str, Any]] = [
        {"quota_cores": 1.5}, {"max_file_bytes": 2**42}, {"clock_behind_seconds": 2.0}, {"is_synchronized": False},
        {"board_clock_ahead_seconds": 0.9}, {"board_clock_ahead_seconds": 7200.0, "is_synchronized": True},
    ]  # fmt: skip
    assert [bad(judge_host(healthy.host(**changes), NEEDS)) for changes in harmless] == [[]] * len(harmless)


def test_a_clock_behind_what_was_written_before(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    written = (tmp_path / "old").stat().st_mtime
    witnesses = [tmp_path / "old", tmp_path / "none"]
    assert clock_behind(written + 9.0, witnesses) == 0.0 == clock_behind(written - 0.5, witnesses)
    assert clock_behind(written - 7200.0, witnesses) == pytest.approx(7200.0)


def test_the_clock_of_the_board() -> None:
    board = {"/sys/class/rtc/rtc0/since_epoch": "1000\n", "/etc/adjtime": "0.0 0 0.0\n0\nUTC\n"}
    assert board_ahead(400.0, lambda path: board.get(path, "")) == 600.0
    assert board_ahead(400.0, lambda path: (board | {"/etc/adjtime": "0.0 0 0.0\n0\nLOCAL\n"}).get(path, "")) is None
    assert board_ahead(400.0, lambda path: "") is None


def test_a_file_server_with_another_time() -> None:
    row = only(judge_disk(msgspec.structs.replace(DISK, clock_ahead_seconds=-10800.0), NEEDS))
    assert row.name == "clock" and row.state == "warn" and "3.0 h behind" in row.measured and row.remedy
    assert disk_room(Path.cwd()).clock_ahead_seconds == pytest.approx(0.0, abs=FAR_SKEW_SECONDS)


def test_name_servers() -> None:
    text = "# nameserver 1.1.1.1\nsearch a\nnameserver 10.0.0.1\nnameserver 10.0.0.2\n"
    assert nameservers(text) == ["10.0.0.1", "10.0.0.2"]
    asked: list[str] = []

    def second(server: str, seconds: float) -> bool:
        asked.append(server)
        return server == "10.0.0.2"

    assert name_problem(lambda path: text, second) == "" and asked == ["10.0.0.1", "10.0.0.2"]
    assert "10.0.0.1, 10.0.0.2" in name_problem(lambda path: text, lambda server, seconds: False)
    assert name_problem(lambda path: "", second) == "", "there are none to ask"


def test_any_answer_of_a_name_server_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(names, "PORT", server.getsockname()[1])

        def answer() -> None:
            question, client = server.recvfrom(512)
            server.sendto(question[:2] + b"\x81\x05" + question[4:], client)  # REFUSED

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert names.answers("127.0.0.1", HUNG_SECONDS)
        thread.join(HUNG_SECONDS)
        assert not names.answers("127.0.0.1", 0.01), "nobody answers any more"
    assert not names.answers("127.0.0.1", HUNG_SECONDS), "nobody listens"


def test_missing_packages() -> None:
    needs = msgspec.structs.replace(NEEDS, packages=("vllm",))
    assert "pip install vllm" in only(judge_host(healthy.host(), needs)).remedy


def test_a_variable_that_does_not_exist_is_named_with_what_was_meant() -> None:
    row = only(judge_host(healthy.host(environment={"NCCL_ASYNC_ERROR_HANDLING": "1"}), NEEDS))
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in row.remedy


def test_unlike_versions_and_clocks() -> None:
    hosts = [healthy.host(host=f"n{number}") for number in range(4)]
    hosts[2] = msgspec.structs.replace(hosts[2], packages={"windlass": "0.1.0", "torch": "2.9.0"})
    row = only(judge_alike(hosts, {one.host: 0.001 for one in hosts}))
    assert row.host == "n2" and "torch 2.9.0" in row.measured
    well = [healthy.host(host=f"n{number}") for number in range(4)]
    row = only(judge_alike(well, {"n0": 0.0, "n1": 0.0, "n2": 0.4, "n3": 0.0}))
    assert (row.name, row.host, row.state) == ("clock", "n2", "warn") and "ahead" in row.measured
    assert only(judge_alike(well, {"n0": -3600.0})).state == "fail"


def test_facts_travel_as_json() -> None:
    facts = healthy.machine()
    assert msgspec.json.decode(msgspec.json.encode(facts), type=MachineFacts) == facts


def test_this_machine_is_read() -> None:
    facts = read_machine()
    assert facts.host.num_cores >= 1 and facts.host.packages["windlass"] and facts.host.shm_total_bytes >= 0
    assert msgspec.json.decode(msgspec.json.encode(facts), type=MachineFacts) == facts


def test_fifty_looks_at_this_machine_give_no_false_alarm() -> None:
    """Of what is read (nothing is measured): it is the same machine fifty times."""
    alarms = [
        (row.name, row.measured) for _ in range(50) for row in judge_machine(read_machine(), Needs()) if row.state == "fail"
    ]
    assert alarms == []


def test_instruction_sets() -> None:
    assert instruction_sets("flags\t\t: fpu avx2 fma avx512f\n") == ("avx2", "fma", "avx512f")
    assert instruction_sets("Features\t: fp asimd sve\n") == ("asimd", "sve")


# --- disks

DISK = DiskFacts(
    folder="/data", free_bytes=500 * GIB, total_bytes=1000 * GIB, free_inodes=10**6, read_bytes_per_second=5e9, write_bytes_per_second=2e9,
    random_reads_per_second=20000.0, fsync_seconds=0.001, renames=True,
)  # fmt: skip
DISK_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"free_bytes": 10 * GIB}, "disk room", "fail"),
    ({"free_inodes": 3}, "disk room", "fail"),
    ({"problem": "Read-only file system"}, "disk room", "fail"),
    ({"read_bytes_per_second": 1e8}, "disk speed", "warn"),
    ({"write_bytes_per_second": 1e7}, "disk speed", "warn"),
    ({"fsync_seconds": 2.0}, "disk speed", "warn"),
    ({"renames": False}, "disk rename", "fail"),
]


@pytest.mark.parametrize(("changes", "name", "state"), DISK_FAULTS)
def test_a_disk_that_will_not_do_is_named(changes: dict[str, Any], name: str, state: str) -> None:
    needs = Needs(disk_bytes=100 * GIB, disk_read_bytes_per_second=1e9)
    assert bad(judge_disk(DISK, needs)) == []
    row = only(judge_disk(msgspec.structs.replace(DISK, **changes), needs))
    assert (row.name, row.state) == (name, state)


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    facts = measure_disk(tmp_path, 4 * 2**20)
    assert (
        facts.write_bytes_per_second > 0
        and facts.read_bytes_per_second > 0
        and facts.random_reads_per_second > 0
        and facts.renames
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    assert disk_room(tmp_path / "not" / "yet").is_writable
    assert not disk_room(Path("/proc/sys")).is_writable
    assert not renames(Path("/proc/sys"))


def test_storage_that_is_not_shared_is_found() -> None:
    well = [SharedFacts(host=name, folder="/data", sees=("a", "b", "c"), write_bytes_per_second=1e9) for name in "abc"]
    assert bad(judge_shared(well)) == []
    torn = [*well[:2], msgspec.structs.replace(well[2], sees=("c",))]
    row = only(judge_shared(torn))
    assert row.host == "c" and "a, b" in row.measured
