from __future__ import annotations

import threading
from pathlib import Path

import pytest

from windlass.core.hardware.devices import device
from windlass.core.hardware.parse import parse_hardware
from windlass.errors import BadInput
from windlass.runtime.machine import bandwidth, cgroups, gpus, memory, system
from windlass.runtime.machine.probe import apple_device, as_hardware, free_disk_bytes, probe, share_equal_devices
from windlass.units import MIB

pytestmark = pytest.mark.pure

CPUINFO = """processor : 0
model name : AMD EPYC 9654
physical id : 0
core id : 0

processor : 1
model name : AMD EPYC 9654
physical id : 0
core id : 1

processor : 2
model name : AMD EPYC 9654
physical id : 0
core id : 0

processor : 3
model name : AMD EPYC 9654
physical id : 1
core id : 0
"""
MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   30000000 kB\n"


@pytest.mark.parametrize(("allowed", "cores"), [({0, 1, 2, 3}, 3), ({0, 2}, 1), ({3}, 1), ({0, 1}, 2), ({9}, 1)])
def test_physical_cores(allowed: set[int], cores: int) -> None:
    assert system.physical_cores(CPUINFO, allowed) == cores


def test_arm_has_no_core_ids() -> None:
    cpuinfo = "processor : 0\nBogoMIPS : 50\n\nprocessor : 1\nBogoMIPS : 50\n"
    assert system.physical_cores(cpuinfo, {0, 1}) == 2
    assert system.cpu_model(cpuinfo) == "unknown CPU"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000", 2.0), ("150000 100000\n", 1.5), ("max 100000", None), ("-1 100000", None), ("", None), ("5 0", None)],
)
def test_quota(text: str, cores: float | None) -> None:
    assert cgroups.quota_cores(text) == cores


@pytest.mark.parametrize(("physical", "quotas", "cores"), [(8, [], 8), (8, [1.5], 2), (8, [0.2], 1), (2, [16.0], 2)])
def test_usable_cores(physical: int, quotas: list[float], cores: int) -> None:
    assert system.usable_cores(physical, quotas) == cores


@pytest.mark.parametrize(
    ("limit", "usage", "stat", "room"),
    [
        ("max", "5", "", None),
        ("9223372036854771712", "5", "", None),
        ("", "", "", None),
        ("1000", "400", "", 600),
        ("1000", "400", "anon 1\ninactive_file 300\n", 900),
        ("1000", "400", "inactive_file 1\ntotal_inactive_file 300\n", 601),
        ("1000", "5000", "", 0),
    ],
)
def test_room_in_a_control_group(limit: str, usage: str, stat: str, room: int | None) -> None:
    assert memory.cgroup_headroom(limit, usage, stat) == room


def test_group_folders() -> None:
    assert cgroups.group_folders("0::/a/b\n", "memory") == ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]
    version_1 = "5:cpu,cpuacct:/job\n4:memory:/job\n"
    assert cgroups.group_folders(version_1, "memory") == ["/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory"]
    assert cgroups.group_folders(version_1, "cpu") == ["/sys/fs/cgroup/cpu/job", "/sys/fs/cgroup/cpu"]
    assert cgroups.group_folders("", "cpu") == ["/sys/fs/cgroup", "/sys/fs/cgroup/cpu"]


def test_a_container_owns_less_than_the_machine() -> None:
    files = {
        "/proc/cpuinfo": CPUINFO,
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/slurm/job_7\n",
        "/sys/fs/cgroup/slurm/job_7/memory.max": "max",
        "/sys/fs/cgroup/slurm/memory.max": str(8 * 2**30),
        "/sys/fs/cgroup/slurm/memory.current": str(2**30),
        "/sys/fs/cgroup/slurm/job_7/cpu.max": "200000 100000",
    }
    found = system.linux(lambda path: files.get(path, ""), {0, 1, 2, 3})
    assert (found.num_cores, found.ram_bytes, found.cpu_model) == (2, 7 * 2**30, "AMD EPYC 9654")
    assert found.total_ram_bytes == 32_000_000 * 1024


def test_a_bare_machine() -> None:
    found = system.linux(lambda path: {"/proc/cpuinfo": CPUINFO, "/proc/meminfo": MEMINFO}.get(path, ""), {0, 1, 2, 3})
    assert (found.num_cores, found.ram_bytes) == (3, 30_000_000 * 1024 // MIB * MIB)


def test_macos() -> None:
    text = "machdep.cpu.brand_string: Apple M4 Max\nhw.physicalcpu: 16\nhw.memsize: 137438953472\nkern.boottime: { sec = 1 }\n"
    found = system.macos(text)
    assert (found.cpu_model, found.num_cores, found.ram_bytes) == ("Apple M4 Max", 16, 96 * 2**30)
    hardware = as_hardware(found, [], 10**12, None)
    (mac,) = hardware.devices
    assert (mac.name, mac.kind, mac.memory_bytes) == ("M4-Max", "metal", 96 * 2**30)
    assert hardware.nodes[0].ram_bytes == 32 * 2**30


@pytest.mark.parametrize(
    ("brand", "gib", "name"),
    [("Apple M4 Max", 36, "M4-Max-32core"), ("Apple M3 Ultra", 256, "M3-Ultra"), ("Apple M9", 8, None), ("AMD EPYC", 8, None)],
)
def test_apple_chips(brand: str, gib: int, name: str | None) -> None:
    found = apple_device(system.System(cpu_model=brand, num_cores=8, ram_bytes=gib * 2**30, total_ram_bytes=gib * 2**30))
    assert (found.name if found else None) == name


# --- GPUs ------------------------------------------------------------------------------------------------------------


def _gpu(number: int, name: str = "NVIDIA H200", memory_mib: int | None = 143771) -> gpus.Gpu:
    return gpus.Gpu(name=name, uuid=f"GPU-{number}abc", memory_bytes=None if memory_mib is None else memory_mib * MIB)


def test_gpus_are_matched_to_the_catalog() -> None:
    assert gpus.gpu_device(_gpu(0)) is device("H200")
    assert gpus.gpu_device(_gpu(0, memory_mib=144384)).memory_bytes == 144384 * MIB
    assert gpus.gpu_device(_gpu(0, "NVIDIA GB10", None)) is device("DGX-Spark")


def test_an_unknown_card_is_estimated() -> None:
    gpu = gpus.Gpu(name="NVIDIA Z9", uuid="GPU-0", memory_bytes=8 * 2**30, memory_clock_mhz=2619, bus_width_bits=5120, watts=300)
    found = gpus.gpu_device(gpu)
    assert found.bandwidth == pytest.approx(3.35e12, rel=0.002)  # these are an H100's clock and bus
    assert found.flops["bf16"] == pytest.approx(3.35e14, rel=0.002)
    assert found.watts == 300 and "not in the catalog" in found.source
    assert gpus.gpu_device(_gpu(0, "NVIDIA Z9", 1000)).bandwidth == gpus.UNKNOWN_BANDWIDTH


class FakeNvml:
    """One GB10 as its driver answers: no memory of its own to report, a name in bytes as old versions gave it."""

    NVML_CLOCK_MEM = 2

    class NVMLError(Exception):
        pass

    def __init__(self, dead: bool = False) -> None:
        self.dead = dead
        self.open = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.dead:
            raise self.NVMLError("Driver/library version mismatch")
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"NVIDIA GB10"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def __getattr__(self, name: str) -> object:
        def unsupported(*arguments: object) -> object:
            raise self.NVMLError("Not Supported")

        return unsupported


def test_nvml_that_answers_little() -> None:
    nvml = FakeNvml()
    assert gpus.query(nvml) == [gpus.Gpu(name="NVIDIA GB10", uuid="GPU-0", memory_bytes=None)]
    assert not nvml.open


def test_nvml_that_does_not_answer() -> None:
    with pytest.raises(BadInput, match="NVML initialization failed"):
        gpus.query(FakeNvml(dead=True))


@pytest.mark.parametrize(
    ("setting", "numbers"),
    [(None, [0, 1, 2, 3]), ("", []), ("2,0", [2, 0]), ("1,9,0", [1]), ("GPU-3a", [3]), ("-1", []), ("NoDevFiles", [])],
)
def test_cuda_visible_devices(setting: str | None, numbers: list[int]) -> None:
    four = [_gpu(number) for number in range(4)]
    assert gpus.visible(four, setting) == [four[number] for number in numbers]


def test_a_gpu_node_reads_back() -> None:
    here = system.System(cpu_model="Xeon", num_cores=16, ram_bytes=200 * 2**30, total_ram_bytes=256 * 2**30)
    hardware = as_hardware(here, [gpus.gpu_device(_gpu(number, memory_mib=144384)) for number in range(2)], 500 * 10**9, 120e9)
    assert hardware.description == "2xH200[141GiB],ram=200GiB,disk=500GB,bw=120GB"
    assert parse_hardware(hardware.description) == hardware
    assert len(hardware.distinct_devices) == 1


def test_share_alike() -> None:
    first, second = gpus.gpu_device(_gpu(0, memory_mib=1000)), gpus.gpu_device(_gpu(1, memory_mib=1000))
    shared = share_equal_devices([first, second, device("H100")])
    assert shared[0] is shared[1] and len(shared) == 3


# --- memory speed ----------------------------------------------------------------------------------------------------


class Clock:
    """A 128th of a second passes whenever somebody looks; each thread has its own, as if they ran side by side."""

    def __init__(self) -> None:
        self.now = threading.local()

    def perf_counter(self) -> float:
        self.now.seconds = getattr(self.now, "seconds", 0.0) + 1 / 128
        return self.now.seconds


@pytest.mark.parametrize("num_cores", [1, 2, 8, 1000])
def test_measuring_reads_little(num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is gone through until 0.03 s have passed by the thread's clock: three times here, on every machine."""
    read: list[int] = []
    monkeypatch.setattr(bandwidth, "time", Clock())
    monkeypatch.setattr(bandwidth, "_l3_bytes", lambda: 0)
    monkeypatch.setattr(bandwidth, "_memchr", lambda: lambda address, byte, size: read.append(size))
    monkeypatch.setattr(bandwidth.ctypes, "memset", lambda address, byte, size: None)
    speed = bandwidth.measure(num_cores)
    threads = min(num_cores, bandwidth.MAX_THREADS)
    assert len(read) == 3 * threads and len(set(read)) == 1
    assert bandwidth.TOTAL_BYTES / 2 <= threads * read[0] <= max(bandwidth.TOTAL_BYTES, threads * bandwidth.MIN_BYTES_PER_THREAD)
    assert speed == pytest.approx(sum(read) / (5 / 128), rel=0.02)


@pytest.mark.parametrize(
    ("size", "threads", "expected"),
    [
        ("2048K", "0", 2048 * 1024),
        ("2M", "0,16", 1024 * 1024),
        ("1024K", "0-1", 512 * 1024),
        ("", "0", 1024 * 1024),
        ("2M", "", 2**21),
    ],
)
def test_a_threads_second_level_cache(tmp_path: Path, size: str, threads: str, expected: int) -> None:
    folder = tmp_path / "index2"
    folder.mkdir()
    (folder / "size").write_text(size + "\n")
    (folder / "shared_cpu_list").write_text(threads + "\n")
    assert bandwidth.second_level_bytes(tmp_path) == expected
    assert bandwidth.second_level_bytes(tmp_path / "nowhere") == bandwidth.USUAL_SECOND_LEVEL


def test_this_machines_memory_is_plausible() -> None:
    """Several times: a thread that waits for a core in the middle of it finds memory slower than anybody would believe."""
    found = [bandwidth.measure(2) for _ in range(10)]
    assert all(speed is None or 1e9 <= speed <= 5e12 for speed in found) and any(found)


def test_what_was_measured_is_remembered(tmp_path: Path) -> None:
    path = bandwidth.cache_path({"XDG_CACHE_HOME": str(tmp_path)}, Path("/home/me"))
    assert path == tmp_path / "windlass" / "machine.json"
    assert bandwidth.read_cache(path, "a") is None
    kept = bandwidth.CachedBandwidth(key="a", read_bandwidth=3e10, measured_at=1.0)
    bandwidth.write_cache(path, kept)
    assert bandwidth.read_cache(path, "a") == kept
    assert bandwidth.read_cache(path, "another boot") is None
    assert [each.name for each in path.parent.iterdir()] == ["machine.json"]
    path.write_text("{")
    assert bandwidth.read_cache(path, "a") is None
    path.write_text('{"key": "a", "read_bandwidth": 1}')
    assert bandwidth.read_cache(path, "a") is None


def test_a_reading_of_a_busy_machine_is_bettered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    readings, clock = iter([2e10, 9e10, 4e10]), iter([1e9, 1e9 + 599, 1e9 + 601, 1e9 + 1202, 1e9 + 1203])
    monkeypatch.setattr(bandwidth, "measure", lambda _: next(readings))
    monkeypatch.setattr(bandwidth.time, "time", lambda: next(clock))
    assert [bandwidth.read_bandwidth(2, "a") for _ in range(5)] == [2e10, 2e10, 9e10, 9e10, 9e10]


def test_not_being_able_to_write_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "windlass").write_text("a file where a folder should be")
    bandwidth.write_cache(tmp_path / "windlass" / "machine.json", bandwidth.CachedBandwidth(key="a", read_bandwidth=3e10))


def test_cache_path_without_xdg() -> None:
    assert bandwidth.cache_path({}, Path("/home/me")) == Path("/home/me/.cache/windlass/machine.json")


# --- this machine ----------------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # On a machine with much else to do, what is measured may be too little to be kept.
    monkeypatch.setattr(bandwidth, "measure", lambda _: 12.5e9)
    hardware = probe(tmp_path)
    (node,) = hardware.nodes
    assert node.devices and node.ram_bytes > 0 and node.ram_bandwidth == 12.5e9
    monkeypatch.setattr(bandwidth, "measure", lambda _: pytest.fail("measured twice in one boot"))
    assert probe(tmp_path / "not" / "there").nodes[0].ram_bandwidth == node.ram_bandwidth


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path / "not" / "there") == pytest.approx(free_disk_bytes(tmp_path), rel=0.1)


@pytest.mark.parametrize(
    ("threads", "l3", "expected"),
    [(2, 0, 64), (2, 32, 64), (16, 0, 16), (16, 105, 26.25), (16, 320, 80), (64, 32, 16), (1, 512, 128)],
)
def test_memory_that_is_read_is_larger_than_the_caches(threads: int, l3: int, expected: float) -> None:
    assert bandwidth.bytes_per_thread(threads, l3 * MIB) == int(expected * MIB)


def test_gpus_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`windlass check MODEL --device cpu` plans for the CPU of a machine that has GPUs."""
    found = gpus.Gpu(name="NVIDIA H200", uuid="GPU-0", memory_bytes=141 * 2**30)
    monkeypatch.setattr("windlass.runtime.machine.probe.this_machines_gpus", lambda: [found])
    assert [one.kind for one in probe(measure=False).nodes[0].devices] == ["cuda"]
    assert [one.kind for one in probe(measure=False, gpus=False).nodes[0].devices] == ["cpu"]


@pytest.mark.parametrize(
    ("cpuinfo", "isa"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw avx512_vnni amx_int8\n", "avx512"),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw\n", "avx2"),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx_vnni\n", "avx2"),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", "neon"),
        ("processor\t: 0\nflags\t\t: fpu sse2\n", ""),
        ("", ""),
    ],
)
def test_instruction_sets(cpuinfo: str, isa: str) -> None:
    assert system.cpu_isa(cpuinfo) == isa
