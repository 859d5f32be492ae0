from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windlass.core.hardware import devices
from windlass.core.hardware.parse import describe, parse_hardware
from windlass.errors import BadInput, Error, UnknownName

pytestmark = pytest.mark.pure

GOOD = [  # text, canonical text, nodes, devices, network in bytes per second
    ("8xH100-80GB", "8xH100-80GB", 1, 8, 0),
    ("H200", "1xH200", 1, 1, 0),
    (" 8 x h100 ", "8xH100-80GB", 1, 8, 0),
    ("2xA100-80GB,ram=200GB,disk=500GB", "2xA100-80GB,ram=200GB,disk=500GB", 1, 2, 0),
    ("2xA100-80GB , ram = 200 GB", "2xA100-80GB,ram=200GB", 1, 2, 0),
    ("2xA100-80GB[70GB]", "2xA100-80GB[70GB]", 1, 2, 0),
    ("2x4090", "2xRTX-4090", 1, 2, 0),
    ("4x(8xH100-80GB)@400Gb", "4x(8xH100-80GB)@400Gb", 4, 32, 50e9),
    ("4x(8xH100-80GB)", "4x(8xH100-80GB)@400Gb", 4, 32, 50e9),
    ("1x(8xH100-80GB)@400Gb", "8xH100-80GB", 1, 8, 0),
    ("(8xH100-80GB)+(8xA100-80GB)@100Gb", "1x(8xH100-80GB)+1x(8xA100-80GB)@100Gb", 2, 16, 12.5e9),
    ("3x(cpu:16,ram=32GB)@1Gb", "3x(cpu:16,ram=32GB)@1Gb", 3, 3, 0.125e9),
    ("3x(cpu:16,ram=32GB)", "3x(cpu:16,ram=32GB)@1Gb", 3, 3, 0.125e9),
    ("cpu:16,ram=32GB", "cpu:16,ram=32GB", 1, 1, 0),
    ("CPU:4", "cpu:4", 1, 1, 0),
    ("cpu:16[20GB],ram=32GB,bw=200GB/s", "cpu:16[20GB],ram=32GB,bw=200GB", 1, 1, 0),
    ("1x(2xH100-80GB)+1x(4xRTX-4090)@100Gb", "1x(2xH100-80GB)+1x(4xRTX-4090)@100Gb", 2, 6, 12.5e9),
    ("2xH100-80GB+1xA100-80GB", "2xH100-80GB+1xA100-80GB", 1, 3, 0),
    ("2x(H100)@400Gb/s,latency=5us", "2x(1xH100-80GB)@400Gb,latency=5us", 2, 2, 50e9),
    ("64xH100-80GB", "8x(8xH100-80GB)@400Gb", 8, 64, 50e9),
    ("16xH100@200Gb", "2x(8xH100-80GB)@200Gb", 2, 16, 25e9),
    ("1x(12xH100)", "1x(12xH100-80GB)", 1, 12, 0),
    ("72xGB200", "72xGB200", 1, 72, 0),
    ("2xDGX-Spark", "2x(1xDGX-Spark)@200Gb", 2, 2, 25e9),
]


@pytest.mark.parametrize(("text", "canonical", "nodes", "num_devices", "network"), GOOD)
def test_understood(text: str, canonical: str, nodes: int, num_devices: int, network: float) -> None:
    hardware = parse_hardware(text)
    assert hardware.description == describe(hardware) == canonical
    assert (len(hardware.nodes), len(hardware.devices), hardware.network_bandwidth) == (nodes, num_devices, network)
    assert hardware.num_devices == num_devices
    assert parse_hardware(canonical) == hardware


BAD = [  # text, what the message must say
    ("", "empty"),
    ("0xH100", "0 is not a number of devices"),
    ("9999999xH100", "not a number of devices"),
    ("2000000x(1xH100)", "not a number of nodes"),
    ("1000x(5000xH100)", "more than 1,000,000 devices"),
    ("99999999999999999999xH100", "not a number of devices"),
    ("8xH1000", "did you mean H100"),
    ("8xH100,rm=3GB", "did you mean ram"),
    ("8xH100,ram=3parsecs", "unit of size"),
    ("8xH100,ram=0GB", "not a sensible size"),
    ("8xH100,ram=" + "9" * 400 + "GB", "not a sensible size"),
    ("8xH100,ram=1GB,ram=2GB", "twice"),
    ("8xH100,1xA100", "joined with +"),
    ("8xH100@400Gb", "one node"),
    ("2x(8xH100)@fast", "link speed"),
    ("2x(8xH100)@0Gb", "link speed"),
    ("2x(8xH100)@400Gb,speed=3", "latency=5us"),
    ("2x(8xH100)@400Gb,latency=soon", "not a latency"),
    ("4x(8xH100", "brackets"),
    ("8xH100)", "brackets"),
    ("2x(8xH100)+4xA100", "brackets"),
    ("2x(3x(8xH100))", "brackets"),
    ("many(8xH100)", "number of nodes"),
    ("20xH100", "at most 8"),
    ("16xH100,ram=2TB", "at most 8"),
    ("cpu", "how many cores"),
    ("cpu:0", "cores"),
    ("cpu:99999", "cores"),
    ("2xcpu:16", "stand alone"),
    ("2xH100+cpu:16", "stand alone"),
    ("cpu:4[20GB],ram=8GB", "exceeds the node's RAM"),
    ("A100-80GB[100GB]", "exceeds its memory"),
    ("A100-80GB[", "not a device"),
    ("8xH100,name=a b", "not a node's name"),
    ("nowhere.toml", "No such file"),
    ("\0.toml", "cannot read"),
    ("x" * 5000, "too long"),
]


@pytest.mark.parametrize(("text", "said"), BAD)
def test_refused_with_a_reason(text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_hardware(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_stated_is_typical() -> None:
    node = parse_hardware("8xH100-80GB").nodes[0]
    assert node.ram_bytes == 2 * 8 * devices.device("H100").memory_bytes
    assert node.disk_bytes == 2 * 10**12
    capped = parse_hardware("8xH100-80GB[40GB]").nodes[0]
    assert capped.ram_bytes == node.ram_bytes
    mac = parse_hardware("M3-Ultra").nodes[0]  # one memory for both, so the host has only what Metal leaves
    assert mac.ram_bytes * 3 == mac.devices[0].memory_bytes
    cpu = parse_hardware("cpu:16").nodes[0]
    assert cpu.ram_bytes == cpu.devices[0].memory_bytes == 64 * 10**9


def test_thousands_share_one_device_and_one_node() -> None:
    """The same objects, so that reading and planning cost what one node does."""
    hardware = parse_hardware("1024x(8xH100-80GB)@400Gb")
    assert hardware.uniform and hardware.devices_per_node == 8 and len(hardware.devices) == 8192
    assert describe(hardware) == "1024x(8xH100-80GB)@400Gb"
    assert len({id(each) for each in hardware.devices}) == 1 and len({id(each) for each in hardware.nodes}) == 1
    assert hardware.distinct_devices == (devices.device("H100"),)
    assert len(hardware.distinct_nodes) == 1


def test_unlike_hardware_is_not_uniform() -> None:
    assert not parse_hardware("2xH100-80GB+1xA100-80GB").uniform
    assert not parse_hardware("1x(2xH100)+1x(4xH100)").uniform
    assert not parse_hardware("1x(2xH100)+1x(2xH100[70GB])").uniform
    assert parse_hardware("1x(2xH100)+1x(2xH100,ram=1TB)").uniform


# --- cluster.toml ----------------------------------------------------------------------------------------------------

CLUSTER = """
[[node]]
name = "big"
count = 2
devices = "8xH100-80GB"
ram = "2TB"
disk = "10TB"
ram_bandwidth = "400GB"
disk_bandwidth = "6GB"
[[node]]
devices = "cpu:16"
[network]
bandwidth = "100Gb"
latency_us = 7.5
"""


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return str(path)


def test_cluster_file(tmp_path: Path) -> None:
    hardware = parse_hardware(_file(tmp_path, CLUSTER))
    big, _, small = hardware.nodes
    assert (big.name, big.ram_bytes, big.disk_bytes, big.ram_bandwidth, big.disk_bandwidth) == ("big", 2e12, 10e12, 400e9, 6e9)
    assert small.devices[0].name == "cpu:16"
    assert (hardware.network_bandwidth, hardware.network_latency_seconds) == (12.5e9, 7.5e-6)
    assert parse_hardware(hardware.description) == hardware


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "node"),
        ("[[node]]\ndevises = '8xH100'", "did you mean devices"),
        ("[[node]]\ndevices = '8xH100'\n[network]\nbandwith = '1Gb'", "did you mean bandwidth"),
        ("[[nodes]]\ndevices = '8xH100'", "did you mean node"),
        ("[[node]]\ndevices = 8", "Expected `str`"),
        ("[[node]]\nram = '1TB'", "devices"),
        ("[[node]]\ndevices = '8xH100'\ncount = 0", "count = 0"),
        ("[[node]]\ndevices = '8xH100'\ncount = 99999999999999", "count"),
        ("[[node]]\ndevices = '8xH100,ram=1TB'", "devices only"),
        ("node = 3", "Expected `array`"),
        ("node = []", "no [[node]]"),
        ("[[node]]\ndevices = '8xH100'\n[[node]]\ndevices='H100'\n[network]\nlatency_us = -1.0", "not a latency"),
        ("[[node", "not TOML"),
    ],
)
def test_cluster_file_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_hardware(_file(tmp_path, text))
    assert said in str(caught.value)


# --- properties ------------------------------------------------------------------------------------------------------

ALPHABET = st.sampled_from(
    [*"0123456789xX()+@,=[] :./", "H100", "A100-80GB", "cpu:", "ram", "disk", "bw", "GB", "Gb", "latency", "us", "\0", "٣"]
)
NAMES = st.sampled_from(["H100-80GB", "A100-80GB", "RTX-4090", "H200", "GB200", "MI300X"])
SIZES = st.builds(lambda number, unit: f"{number}{unit}", st.integers(1, 5000), st.sampled_from(["MB", "GB", "GiB", "TB", "MiB"]))
CAPS = st.one_of(st.just(""), st.integers(1, 20_000).map(lambda mib: f"[{mib}MiB]"))


@settings(max_examples=100)
@given(st.one_of(st.text(max_size=60), st.lists(ALPHABET, max_size=14).map("".join)))
@example("²xH100")
@example("٣xH100")
@example("2x(8xH100)@1e99Gb")
@example("8xH100,ram=1e99GB")
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        hardware = parse_hardware(text)
    except Error:
        return
    assert parse_hardware(describe(hardware)) == hardware


@st.composite
def _options(draw: st.DrawFn) -> str:
    keys = draw(st.lists(st.sampled_from(["ram", "disk", "bw", "disk_bw"]), unique=True))
    words = [f",{key}={draw(SIZES)}" for key in keys]
    return "".join(words) + draw(st.sampled_from(["", ",name=a-1"]))


@st.composite
def _nodes(draw: st.DrawFn) -> str:
    if draw(st.booleans()):
        return f"cpu:{draw(st.integers(1, 4096))}{draw(_options())}"
    terms = [f"{draw(st.integers(1, 20))}x{draw(NAMES)}{draw(CAPS)}" for _ in range(draw(st.integers(1, 3)))]
    return "+".join(terms) + draw(_options())


@st.composite
def _clusters(draw: st.DrawFn) -> str:
    groups = [f"{draw(st.integers(1, 50))}x({draw(_nodes())})" for _ in range(draw(st.integers(1, 3)))]
    at = draw(
        st.one_of(st.just(""), st.builds(lambda n, u: f"@{n}{u}", st.integers(1, 10**6), st.sampled_from(["Kb", "Mb", "Gb"])))
    )
    latency = f",latency={draw(st.integers(0, 10**6))}ns" if at and draw(st.booleans()) else ""
    return "+".join(groups) + at + latency


@given(_clusters())
def test_what_is_described_reads_back_the_same(text: str) -> None:
    hardware = parse_hardware(text)
    assert parse_hardware(describe(hardware)) == hardware


def test_unknown_device_is_an_unknown_name() -> None:
    with pytest.raises(UnknownName):
        parse_hardware("8xTPUv5")


OWN = """
[device.My-Card]
memory = "48GB"
bandwidth = "1.2TB"
tflops = { bf16 = 180 }

[[node]]
devices = "4xMy-Card[40GB]"
"""


def test_a_device_by_figures(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    found = parse_hardware(str(tmp_path / "own.toml"))
    card = found.devices[0]
    assert (found.num_devices, card.name, card.memory_bytes) == (4, "My-Card", 40 * 10**9)
    assert card.matmul_flops("bf16") == pytest.approx(0.8 * 180e12)
    assert "fp8" not in card.flops


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tflops = { bf16 = 180 }", "tflops = { fp8 = 180 }"), "needs bf16"),
        (("tflops = { bf16 = 180 }", "tflops = { bf17 = 180 }"), "bf17"),
        (('memory = "48GB"', 'memory = "48GB"\nkind = "npu"'), "npu"),
        (('memory = "48GB"', 'memory = "48GB"\nspeed = 3'), "speed"),
        (("4xMy-Card[40GB]", "4xMy-Card[50GB]"), "exceeds its memory"),
    ],
)
def test_a_device_by_wrong_figures(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / "own.toml").write_text(OWN.replace(*change))
    with pytest.raises((BadInput, UnknownName), match=message):
        parse_hardware(str(tmp_path / "own.toml"))


def test_bandwidth_of_memory_channels() -> None:
    assert parse_hardware("cpu:64,channels=12,ddr=4800").nodes[0].ram_bandwidth == pytest.approx(0.8 * 12 * 8 * 4.8e9)
    assert parse_hardware("1xRTX-4090,channels=2").nodes[0].ram_bandwidth == pytest.approx(0.8 * 2 * 8 * 5.6e9)
    for wrong in ("cpu:8,ddr=4800", "cpu:8,channels=two", "cpu:8,channels=2,bw=50GB", "cpu:8,channels=0"):
        with pytest.raises(BadInput):
            parse_hardware(wrong)


def test_apple_lends_more_if_told_to() -> None:
    node = parse_hardware("M3-Ultra[480GB]").nodes[0]
    assert node.devices[0].memory_bytes == 480 * 10**9
    assert node.ram_bytes + node.devices[0].memory_bytes == 512 * 2**30
    with pytest.raises(BadInput, match="exceeds its memory"):
        parse_hardware("M3-Ultra[550GB]")
