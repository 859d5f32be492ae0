"""The catalog of accelerators: memory, bandwidth and FLOPs by name. Knows no prices, and does not probe.

The figures are in `devices*.toml`, each with its source. Where no measurement is known, one of the fractions below is used.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import msgspec

from windlass.core.hardware.cluster import DeviceTable
from windlass.core.hardware.spec import Device
from windlass.core.model import Frozen
from windlass.errors import BadInput, UnknownName
from windlass.units import MIB, parse_bytes

READ_FRACTION = 4.46 / 4.8
"""A plain read kernel over the vendor's bandwidth: 4.46 of 4.8 TB/s, measured on an H200 (torch 2.11, CUDA 13, 2026-11)."""

HOST_FRACTION = 55 / 63
"""Pinned host-to-device copies over the link's specification: 55 of PCIe 5's 63 GB/s, measured on the same H200."""

MATMUL_FRACTION = {"bf16": 0.8, "fp8": 0.72, "int8": 0.72, "fp4": 0.72}
"""Large matmuls over the dense peak, where no measurement is known.

The mean of what stas00/ml-engineering's MAMF table gives for NVIDIA is 0.79 in bf16 (A100 0.87, H100 0.80, B200 0.78, B300 0.79,
GB200 0.74) and 0.71 to 0.76 in fp8; int8 and fp4 have no measurement there and are taken to be as fp8.
A device whose own bf16 was measured below these (MI300X: 0.51) gets its own bf16 fraction for the types without a measurement.
"""

HOST_LINK_BYTES_PER_SECOND = {
    "pcie3": 15.75e9,
    "pcie4": 31e9,
    "pcie5": 63e9,
    "pcie6": 121e9,
    "nvlink-c2c": 450e9,
    "nvlink-c2c-shared": 225e9,  # two GPUs to one Grace
}
"""x16, one direction (stas00/ml-engineering network README); NVLink-C2C is 900 GB/s both ways per Grace CPU (from memory)."""

DEFAULT_NIC_BYTES_PER_SECOND = 1.25e9
"""10 Gb Ethernet: for devices without a known network."""


FILES = ("devices.toml", "devices_other.toml", "devices_consumer.toml")


class Entry(Frozen):
    """A table of devices.toml; units as explained at the top of that file."""

    memory_mib: int
    bandwidth_tb_per_s: float
    tflops: dict[str, float]
    host_link: str
    watts: float
    source: str
    kind: str = "cuda"
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    host_share_mib: int | None = None
    """CPU part of unified memory. None: the host has its own memory."""
    measured_bandwidth_tb_per_s: float | None = None
    measured_tflops: dict[str, float] = {}
    measured_host_gb_per_s: float | None = None
    link: str = ""
    link_gb_per_s: float = 0.0
    link_peer_gb_per_s: float = 0.0
    nic_gb_per_s: float | None = None
    per_node: int = 8
    note: str = ""


@cache
def catalog() -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for name in FILES:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        found.update(msgspec.convert(tomllib.loads(text), dict[str, Entry]))
    return found


def names() -> tuple[str, ...]:
    return tuple(catalog())


def canonical_name(name: str) -> str:
    """`h100`, `RTX 4090` or `4090` -> the catalog's own spelling."""
    found = _spellings().get(_key(name))
    if found is None:
        raise UnknownName("device", name, names(), hint=f"{_nearest(name)} `windlass devices` lists all")
    return found


def _nearest(name: str) -> str:
    """The devices whose name, or another spelling of it, is nearest, each once and with its memory; cards of the same series first."""
    import difflib

    keys = {_key(spelling): device_name for device_name, found in catalog().items() for spelling in (device_name, *found.aliases)}
    close = [keys[key] for key in difflib.get_close_matches(_key(name), keys, n=12, cutoff=0.5)]
    near = list(dict.fromkeys(close))[:3]
    if not near:
        return f"known: {', '.join(names()[:6])} and others;"
    return "did you mean " + ", ".join(f"{one} ({catalog()[one].memory_mib / 1024:.0f} GiB)" for one in near) + "?"


def entry(name: str) -> Entry:
    return catalog()[canonical_name(name)]


def device(name: str) -> Device:
    """The `Device` of that name; cached, so that thousands share one object."""
    return _build(canonical_name(name))


def nic_bandwidth(name: str) -> float:
    """Usual network bandwidth per device, bytes per second in one direction."""
    found = _spellings().get(_key(name))
    gb_per_s = catalog()[found].nic_gb_per_s if found else None
    return DEFAULT_NIC_BYTES_PER_SECOND if gb_per_s is None else gb_per_s * 1e9


def by_driver_name(driver_name: str) -> str | None:
    """`NVIDIA H100 80GB HBM3` -> `H100-80GB`; None for an unknown card (a laptop's RTX 4090 is a different one)."""
    return _driver_names().get(_driver_key(driver_name))


@cache
def _spellings() -> dict[str, str]:
    return {_key(spelling): name for name, found in catalog().items() for spelling in (name, *found.aliases)}


@cache
def _driver_names() -> dict[str, str]:
    return {_driver_key(spelling): name for name, found in catalog().items() for spelling in found.driver_names}


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")


def _driver_key(driver_name: str) -> str:
    return re.sub(r"^(nvidia )?(geforce )?", "", driver_name.strip().lower())


@cache
def _build(name: str) -> Device:
    return _from_entry(name, catalog()[name])


def _from_entry(name: str, found: Entry) -> Device:
    bandwidth = found.bandwidth_tb_per_s * 1e12
    measured = found.measured_bandwidth_tb_per_s
    measured_bandwidth = bandwidth * READ_FRACTION if measured is None else measured * 1e12
    return Device(
        name=name,
        kind=found.kind,
        memory_bytes=found.memory_mib * MIB,
        bandwidth=bandwidth,
        measured_bandwidth=measured_bandwidth,
        flops={kind: tflops * 1e12 for kind, tflops in found.tflops.items()},
        measured_flops={kind: _measured_tflops(found, kind) * 1e12 for kind in found.tflops},
        link_bandwidth=found.link_gb_per_s * 1e9,
        link_name=found.link,
        link_peer_bandwidth=found.link_peer_gb_per_s * 1e9,
        host_bandwidth=_host_bandwidth(found, measured_bandwidth),
        watts=found.watts,
        source=f"{found.source}; {found.note}" if found.note else found.source,
    )


KINDS = ("cuda", "rocm", "metal", "xpu", "hpu", "tpu")


def device_of_figures(name: str, table: DeviceTable) -> Device:
    """A device that is not in the catalog. What is not given is estimated as for one that is."""
    if table.kind not in KINDS:
        raise UnknownName("kind of device", table.kind, KINDS)
    if wrong := [kind for kind in (*table.tflops, *table.measured_tflops) if kind not in MATMUL_FRACTION]:
        raise UnknownName("type in tflops", wrong[0], tuple(MATMUL_FRACTION))
    if not table.tflops.get("bf16") or min(table.tflops.values()) <= 0:
        raise BadInput(f"[device.{name}]: tflops needs bf16 (fp16 if it has no bf16) above 0, e.g. tflops = {{ bf16 = 180 }}")
    entry = Entry(
        memory_mib=max(parse_bytes(table.memory) // MIB, 1),
        bandwidth_tb_per_s=_per_second(table.bandwidth) / 1e12,
        tflops=table.tflops,
        measured_tflops=table.measured_tflops,
        host_link="pcie4",
        measured_host_gb_per_s=None if table.host is None else _per_second(table.host) / 1e9,
        link_gb_per_s=HOST_LINK_BYTES_PER_SECOND["pcie4"] / 1e9 if table.link is None else _per_second(table.link) / 1e9,
        watts=table.watts,
        kind=table.kind,
        source="figures from the file",
    )
    return _from_entry(name, entry)


def _per_second(text: str) -> int:
    return parse_bytes(text.strip().removesuffix("/s"))


def _measured_tflops(found: Entry, kind: str) -> float:
    if kind in found.measured_tflops:
        return found.measured_tflops[kind]
    fraction = MATMUL_FRACTION[kind]
    if "bf16" in found.measured_tflops:
        fraction = min(fraction, found.measured_tflops["bf16"] / found.tflops["bf16"])
    return found.tflops[kind] * fraction


def _host_bandwidth(found: Entry, memory_bandwidth: float) -> float:
    if found.measured_host_gb_per_s is not None:
        return found.measured_host_gb_per_s * 1e9
    if found.host_link == "unified":
        return memory_bandwidth
    return HOST_LINK_BYTES_PER_SECOND[found.host_link] * HOST_FRACTION
