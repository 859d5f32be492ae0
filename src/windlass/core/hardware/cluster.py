"""Reads and checks a cluster.toml: unequal nodes, or options that the one-line form does not have. `parse` turns it into Hardware.

[[node]]
name = "big"                 # optional
count = 2                    # optional, 1
devices = "8xH100-80GB"      # as on the command line, or "cpu:16"
ram = "2TB"                  # optional, like all below
disk = "10TB"
ram_bandwidth = "400GB"      # per second
disk_bandwidth = "6GB"       # per second

[network]
bandwidth = "400Gb"          # per device, one direction, bits
latency_us = 5.0

[device.My-Card]             # a device that is not in the catalog, by its figures; then devices = "4xMy-Card"
memory = "48GB"
bandwidth = "1.2TB"          # per second
tflops = { bf16 = 180 }      # peak, dense; also fp8, int8, fp4 if it has them
measured_tflops = {}         # optional, like all below: what large products reach
link = "63GB"                # per second and direction, to the other devices of the node
host = "25GB"                # per second, to host memory
watts = 300
kind = "cuda"                # or rocm, metal, xpu, hpu, tpu
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, cast

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput, UnknownName


class NodeTable(Frozen):
    devices: str
    name: str | None = None
    count: int = 1
    ram: str | None = None
    disk: str | None = None
    ram_bandwidth: str | None = None
    disk_bandwidth: str | None = None

    @property
    def options(self) -> dict[str, str]:
        """The settings under their command-line names."""
        named = {"ram": self.ram, "disk": self.disk, "bw": self.ram_bandwidth, "disk_bw": self.disk_bandwidth, "name": self.name}
        return {key: value for key, value in named.items() if value is not None}


class NetworkTable(Frozen):
    bandwidth: str | None = None
    latency_us: float | None = None


class DeviceTable(Frozen):
    memory: str
    bandwidth: str
    tflops: dict[str, float]
    measured_tflops: dict[str, float] = {}
    link: str | None = None
    host: str | None = None
    watts: float = 0.0
    kind: str = "cuda"


class Cluster(Frozen):
    node: tuple[NodeTable, ...]
    device: dict[str, DeviceTable] = {}
    network: NetworkTable = NetworkTable()


def read_cluster(path: str) -> Cluster:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name no file can have
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise BadInput(f"cannot read the cluster file {path!r}: {reason}") from error
    return parse_cluster(text, path)


def parse_cluster(text: str, path: str = "cluster.toml") -> Cluster:
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except DECODE_ERRORS as error:
        raise BadInput(f"{path}: not TOML: {error}") from error
    _refuse_unknown_keys(table, path)
    try:
        cluster = msgspec.convert(table, Cluster)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: {error}") from error
    if not cluster.node:
        raise BadInput(f'{path}: there is no [[node]]; add at least one, e.g. [[node]] with devices = "8xH100-80GB"')
    return cluster


def _refuse_unknown_keys(table: dict[str, Any], path: str) -> None:
    _check_keys(table, Cluster, f"key in {path}")
    for node in _tables(table.get("node")):
        _check_keys(node, NodeTable, f"key in a [[node]] of {path}")
    devices: object = table.get("device")
    for own in _tables(list(cast("dict[str, object]", devices).values()) if isinstance(devices, dict) else None):
        _check_keys(own, DeviceTable, f"key in a [device] of {path}")
    for network in _tables([table.get("network")]):
        _check_keys(network, NetworkTable, f"key in [network] of {path}")


def _check_keys(table: dict[str, Any], kind: type[Frozen], what: str) -> None:
    known = kind.__struct_fields__
    for key in table:
        if key not in known:
            raise UnknownName(what, key, known)


def _tables(value: object) -> list[dict[str, Any]]:
    """The tables of a list; anything else is left to the type check."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]
