from __future__ import annotations

import pytest

from windlass.core.hardware import devices
from windlass.core.hardware.cpu import cpu_device, default_bandwidth
from windlass.errors import UnknownName

pytestmark = pytest.mark.pure

REQUIRED = """
A100-80GB A100-80GB-PCIe A100-40GB H100-80GB H100-PCIe H100-NVL H200 H800 H20 GH200 B200 B300 GB200 GB300 L40S L4 A10G V100-32GB
RTX-PRO-6000 RTX-3090 RTX-4090 RTX-5090 MI300X MI325X MI355X DGX-Spark
M3-Max M2-Ultra M3-Ultra M4 M4-Pro M4-Max M4-Max-32core M5 M5-Pro M5-Max M5-Max-32core M5-Ultra
""".split()


@pytest.mark.parametrize("name", REQUIRED)
def test_the_catalog_has(name: str) -> None:
    assert devices.device(name).name == name


@pytest.mark.parametrize("name", devices.names())
def test_every_entry_is_sane(name: str) -> None:
    found = devices.device(name)
    assert found.kind in devices.KINDS
    assert found.memory_bytes > 6 * 10**9
    assert 0.8 < found.measured_bandwidth / found.bandwidth < 1
    assert found.watts > 0 and found.host_bandwidth > 0 and found.source
    assert "bf16" in found.flops and set(found.measured_flops) == set(found.flops)
    assert all(0.4 < found.measured_flops[kind] / found.flops[kind] < 0.9 for kind in found.flops)


def test_no_two_devices_share_a_spelling() -> None:
    spellings = list(devices.names()) + [alias for entry in devices.catalog().values() for alias in entry.aliases]
    assert len({devices.canonical_name(spelling) for spelling in spellings}) == len(devices.names())
    keys = ["".join(c for c in spelling.lower() if c.isalnum()) for spelling in spellings]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100", "H100-80GB"),
        ("h100-80gb", "H100-80GB"),
        ("A100", "A100-80GB"),
        ("4090", "RTX-4090"),
        ("RTX4090", "RTX-4090"),
        ("rtx 4090", "RTX-4090"),
        ("GB10", "DGX-Spark"),
        ("m3 ultra", "M3-Ultra"),
    ],
)
def test_aliases(spelling: str, name: str) -> None:
    assert devices.device(spelling) is devices.device(name)


def test_unknown_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"did you mean .*H100-80GB"):
        devices.device("H100-80G8")
    with pytest.raises(UnknownName, match="known: "):
        devices.device("")


@pytest.mark.parametrize(
    ("name", "offered"),
    [("RTX 4095", "RTX-4090 (24 GiB)"), ("A100-90GB", "A100-80GB (80 GiB)"), ("5095", "RTX-5090 (32 GiB)"), ("H201", "H200")],
)
def test_the_nearest_are_devices_each_once_with_their_memory(name: str, offered: str) -> None:
    with pytest.raises(UnknownName) as caught:
        devices.device(name)
    message = str(caught.value)
    assert offered in message and message.endswith("`windlass devices` lists all")
    offers = message.split("did you mean ")[1].split("?")[0].split(", ")
    assert len({offer.split(" (")[0] for offer in offers} & set(devices.names())) == len(offers)


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("Tesla T4", "T4"),
        ("", None),
    ],
)
def test_driver_names(driver_name: str, name: str | None) -> None:
    assert devices.by_driver_name(driver_name) == name


def test_measured_figures() -> None:
    h200 = devices.device("H200")
    assert (h200.measured_bandwidth, h200.measured_flops["bf16"], h200.host_bandwidth) == (4.46e12, 804e12, 55e9)
    assert h200.memory_bytes == 143771 * 2**20
    assert devices.device("H100").measured_flops["fp8"] == 1403e12
    mi300x = devices.device("MI300X")  # nobody measured its fp8, so it gets no better a fraction than its bf16 had
    assert mi300x.measured_flops["fp8"] / mi300x.flops["fp8"] == pytest.approx(668 / 1307)
    assert devices.device("A100").matmul_flops("fp8") == devices.device("A100").matmul_flops("bf16")


def test_a_mesh_of_links_is_slower_for_few() -> None:
    mi300x = devices.device("MI300X")
    assert [mi300x.link_among(count) / 1e9 for count in (1, 2, 4, 8)] == [64, 64, 192, 448]
    assert devices.device("H100").link_among(2) == 450e9


def test_nic() -> None:
    assert devices.nic_bandwidth("H100") == 50e9
    assert devices.nic_bandwidth("B300") == 100e9
    assert devices.nic_bandwidth("a card nobody knows") == devices.DEFAULT_NIC_BYTES_PER_SECOND


def test_cpu() -> None:
    assert default_bandwidth(2) == 30e9
    assert all(default_bandwidth(cores) <= default_bandwidth(cores + 1) for cores in range(1, 300))
    cpu = cpu_device(16, 32 * 10**9, 100e9)
    assert (cpu.kind, cpu.name, cpu.measured_bandwidth) == ("cpu", "cpu:16", 100e9)
    assert cpu.matmul_flops("int8") == pytest.approx(16 * 96e9 * 0.6)
    assert cpu_device(16, 32 * 10**9, 100e9) is cpu


CORRECTED = {
    ("MI355X", "bf16"): 2500e12,
    ("MI350X", "bf16"): 2300e12,
    ("B300", "fp8 measured"): 3353e12,
    ("B200", "bandwidth"): 8.0e12,
    ("B300", "bandwidth"): 8.0e12,
    ("RTX-PRO-6000", "bandwidth"): 1.792e12,
    ("RTX-PRO-6000-Server", "bandwidth"): 1.598e12,
    ("A100-PCIE-40GB", "watts"): 250,
    ("B300", "watts"): 1000,
    ("GH200", "watts"): 900,
}


@pytest.mark.parametrize(("name", "what"), CORRECTED)
def test_figures_that_were_wrong(name: str, what: str) -> None:
    found = devices.device(name)
    figures = {**found.flops, "bandwidth": found.bandwidth, "watts": found.watts}
    value = found.measured_flops["fp8"] if what == "fp8 measured" else figures[what]
    assert value == pytest.approx(CORRECTED[name, what])


ASKED_FOR = """
RTX-2080 RTX-2080-Ti RTX-3060 RTX-3080 RTX-3090-Ti RTX-4070 RTX-4080 RTX-5070 RTX-5080 A40 L40 L20 H100-96GB H200-NVL GH200-144GB MI250X
MI350X Radeon-RX-7900-XTX Radeon-AI-PRO-R9700 Strix-Halo Arc-A770 Arc-B580 M1 M1-Max M1-Ultra M2 M2-Max M3 M3-Pro Gaudi2 Gaudi3
TPU-v5e TPU-v5p TPU-v6e
""".split()


@pytest.mark.parametrize("name", ASKED_FOR)
def test_devices_that_people_asked_for(name: str) -> None:
    assert devices.device(name).name == name
