"""Parses the HARDWARE argument. Knows no model and does not probe (that is `machine.probe`).

    H200                                              one device
    8xH100-80GB                                       one node
    2xA100-80GB[70GB],ram=200GB,disk=500GB            a cap per device; options describe the node
    4x(8xH100-80GB)@400Gb                             four such nodes
    3x(cpu:16,ram=32GB)@1Gb                           nodes without accelerators
    2xH100-80GB+1xA100-80GB                           different devices in one node
    1x(2xH100-80GB)+1x(4xRTX-4090)@100Gb,latency=5us  different nodes
    64xH100-80GB                                      more than fit in one node: nodes of eight
    cluster.toml                                      a file (see `cluster`)

`@X` is the network bandwidth per *device*, in bits per second and one direction: DGX-like servers have a NIC per GPU, and a CPU node
is one device. Without `@` the catalog's usual NIC is used.
Options: ram, disk (bytes), bw, disk_bw (bytes per second: reads of RAM and of disk), name; channels and ddr instead of bw: memory channels
of all sockets and their transfers per second (cpu:64,channels=12,ddr=4800); isa (avx2, avx512, amx or neon), and cores of a host beside
accelerators.
A cap above what Apple lends by default is a raised limit (sysctl iogpu.wired_limit_mb): M3-Ultra[480GB].
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from windlass.core.hardware.cluster import Cluster, read_cluster
from windlass.core.hardware.cpu import ISA_FACTOR, channel_bandwidth, cpu_device, default_ram_bytes
from windlass.core.hardware.defaults import DISK_BYTES, network_bandwidth, node_ram_bytes, usual_latency
from windlass.core.hardware.devices import device, device_of_figures, entry
from windlass.core.hardware.notation import describe
from windlass.core.hardware.spec import Device, Hardware, Node
from windlass.errors import BadInput, UnknownName
from windlass.units import GIB, MIB, format_bytes, parse_bit_rate, parse_bytes

__all__ = ["describe", "parse_hardware"]

MAX_DEVICES = 10**6
MAX_CORES = 4096
LARGEST_BOX = 16
"""PCIe servers with ten or twelve cards exist; with more devices, nodes must be written explicitly."""
USUAL_PER_NODE = 8
"""Devices per node if the largest node of the device type does not divide the count: 24 A100s are three nodes of eight."""
MAX_BYTES = 2**53  # beyond, a size is no longer exact as a float
MAX_CHARACTERS = 4096
MAX_CAP_EXCESS = 1.01
"""Drivers differ in what they report (H200: 143771 or 144384 MiB), so a cap may exceed the catalog's memory a little."""

SYSTEM_BYTES = 8 * GIB
"""What the system keeps of unified memory, whatever limit is set."""

EXAMPLE = "write it like 8xH100-80GB or 4x(8xH100-80GB,ram=2TB)@400Gb"
OPTIONS = ("ram", "disk", "bw", "disk_bw", "name", "channels", "ddr", "isa", "cores")
_COUNTED = re.compile(r"(\d+)\s*[xX×*]\s*(.+)", re.DOTALL)
_CAPPED = re.compile(r"([^\[\]]+?)\s*(?:\[([^\[\]]*)\])?")
_CPU = re.compile(r"cpu\s*:\s*(\d+)", re.IGNORECASE)
_TIME = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(ns|us|ms)\s*")
_NAME = re.compile(r"[\w.\-]{1,64}")


def parse_hardware(text: str) -> Hardware:
    text = text.strip()
    if text.lower().endswith(".toml"):
        return _from_cluster(read_cluster(text), text)
    if not text or len(text) > MAX_CHARACTERS:
        raise BadInput(f"the hardware is {'empty' if not text else 'too long'}; {EXAMPLE}")
    body, at, network = text.partition("@")
    groups = _node_groups(body) if "(" in body or ")" in body else _flat(body)
    if at and len(groups) == 1 and groups[0][0] == 1 and "(" not in body:
        raise BadInput(
            f"{text!r}: @ is the network between nodes, and this is one node; write it like 2x({body.strip()})@{network}"
        )
    return _hardware(groups, _bandwidth_and_latency(network) if at else (None, None))


# --- nodes and networks ----------------------------------------------------------------------------------------------


def _hardware(groups: list[tuple[int, Node]], network: tuple[float | None, float | None]) -> Hardware:
    if sum(count * len(node.devices) for count, node in groups) > MAX_DEVICES:
        raise BadInput(f"more than {MAX_DEVICES:,} devices; {EXAMPLE}")
    nodes = tuple(node for count, node in groups for node in (node,) * count)
    bandwidth, latency = network
    if len(nodes) == 1:
        bandwidth = 0.0
    elif bandwidth is None:
        bandwidth = network_bandwidth(nodes)
    hardware = Hardware(nodes=nodes, network_bandwidth=bandwidth)
    if len(nodes) > 1:
        latency = usual_latency(bandwidth) if latency is None else latency
        hardware = msgspec.structs.replace(hardware, network_latency_seconds=latency)
    return msgspec.structs.replace(hardware, description=describe(hardware))


def _node_groups(body: str) -> list[tuple[int, Node]]:
    """`2x(...)+1x(...)` -> (2, node), (1, node)."""
    groups: list[tuple[int, Node]] = []
    for part in re.split(r"(?<=\))\s*\+", body):
        head, opening, inner = part.strip().partition("(")
        if not opening or not inner.endswith(")") or "(" in inner or inner.count(")") > 1:
            raise BadInput(
                f"{part.strip()!r}: nodes of a cluster are written in brackets, e.g. 2x(8xH100-80GB)+1x(4xRTX-4090)@100Gb"
            )
        groups.append((_node_count(head.strip()), _node(inner[:-1])))
    return groups


def _node_count(head: str) -> int:
    """`4x` -> 4; nothing -> 1."""
    if not head:
        return 1
    match = re.fullmatch(r"(\d+)\s*[xX×*]", head)
    if match is None:
        raise BadInput(f"{head!r} before a bracket is not a number of nodes; write it like 4x(8xH100-80GB)")
    return _count(match[1], MAX_DEVICES, "nodes")


def _flat(body: str) -> list[tuple[int, Node]]:
    """A list without brackets is one node, unless it is more of one device than any box holds."""
    match = _COUNTED.fullmatch(body.strip())
    if match and "+" not in body and not _CPU.match(match[2]):
        name_and_cap, comma, _ = match[2].partition(",")
        found = _device(name_and_cap)
        count, per_node = _count(match[1], MAX_DEVICES, "devices"), entry(found.name).per_node
        if count > per_node and (count % USUAL_PER_NODE == 0 or count > LARGEST_BOX or per_node < USUAL_PER_NODE):
            per_node = per_node if count % per_node == 0 else min(per_node, USUAL_PER_NODE)
            if comma or count % per_node:
                raise BadInput(
                    f"{body.strip()!r}: usually at most {per_node} {found.name} share a node; say which do, "
                    f"e.g. 2x({per_node}x{found.name})@400Gb, or 1x({count}x{found.name}) if all {count} do"
                )
            return [(count // per_node, _node(f"{per_node}x{name_and_cap}"))]
    return [(1, _node(body))]


def _bandwidth_and_latency(text: str) -> tuple[float, float | None]:
    rate_text, comma, latency_text = text.partition(",")
    if not comma:
        return _rate(rate_text), None
    key, _, value = latency_text.partition("=")
    if key.strip().lower() != "latency":
        raise BadInput(f"{latency_text.strip()!r} after @ is not understood; write it like @400Gb,latency=5us")
    return _rate(rate_text), _latency_seconds(value)


def _from_cluster(cluster: Cluster, path: str) -> Hardware:
    groups: list[tuple[int, Node]] = []
    own = {name: device_of_figures(name, table) for name, table in cluster.device.items()}
    for table in cluster.node:
        if not 1 <= table.count <= MAX_DEVICES:
            raise BadInput(f"{path}: count = {table.count} is not a number of nodes between 1 and {MAX_DEVICES:,}")
        if "," in table.devices:
            raise BadInput(f'{path}: devices = "{table.devices}" takes devices only; ram and disk are keys of their own')
        groups.append((table.count, _build_node(table.devices, table.options, own)))
    network = cluster.network
    latency = None if network.latency_us is None else _latency_seconds(f"{network.latency_us:f}us")
    return _hardware(groups, (None if network.bandwidth is None else _rate(network.bandwidth), latency))


# --- one node --------------------------------------------------------------------------------------------------------


def _node(text: str) -> Node:
    devices_text, *option_texts = text.split(",")
    options: dict[str, str] = {}
    for option in option_texts:
        key, equals, value = option.partition("=")
        key = key.strip().lower()
        if not equals:
            raise BadInput(
                f"{option.strip()!r} is not an option; write key=value like ram=200GB; devices of one node are joined with +"
            )
        if key in options:
            raise BadInput(f"{key}= is given twice in {text.strip()!r}")
        options[key] = value.strip()
    return _build_node(devices_text, options)


def _build_node(devices_text: str, options: dict[str, str], own: dict[str, Device] | None = None) -> Node:
    """`own`: devices by figures."""
    for key in options:
        if key not in OPTIONS:
            raise UnknownName("hardware option", key, OPTIONS)
    terms = [term.strip() for term in devices_text.split("+")]
    only_cpu = len(terms) == 1 and terms[0].lower().startswith("cpu")
    node = _cpu_node(terms[0], options) if only_cpu else _accelerator_node(terms, options, own or {})
    if "disk_bw" in options:
        node = msgspec.structs.replace(node, disk_bandwidth=float(_size(options["disk_bw"], per_second=True)))
    if "name" not in options:
        return node
    if not _NAME.fullmatch(options["name"]):
        raise BadInput(f"{options['name']!r} is not a node's name; use letters, digits, dots and dashes")
    return msgspec.structs.replace(node, name=options["name"])


def _cpu_node(term: str, options: dict[str, str]) -> Node:
    name, cap = _name_and_cap(term)
    match = _CPU.fullmatch(name)
    if match is None:
        raise BadInput(f"{term!r}: say how many cores, e.g. cpu:16,ram=32GB")
    num_cores = _count(match[1], MAX_CORES, "cores")
    ram = _size(options["ram"]) if "ram" in options else default_ram_bytes(num_cores)
    if cap is not None and cap > ram:
        raise BadInput(f"{term!r}: the cap exceeds the node's RAM of {format_bytes(ram)}; state a larger ram=")
    bandwidth = _read_bandwidth(options)
    found = cpu_device(num_cores, ram if cap is None else cap, bandwidth, isa=_isa(options))
    return Node(devices=(found,), ram_bytes=ram, disk_bytes=_disk(options), ram_bandwidth=found.measured_bandwidth)


def _read_bandwidth(options: dict[str, str]) -> float | None:
    """Of host memory: as given, or by its channels."""
    if "bw" in options and "channels" in options:
        raise BadInput("bw= is the bandwidth and channels= is what it is computed from; give one of them")
    if "bw" in options:
        return float(_size(options["bw"], per_second=True))
    if "channels" not in options:
        if "ddr" in options:
            raise BadInput("ddr= needs channels=, e.g. channels=12,ddr=4800")
        return None
    channels = _count(_digits(options["channels"]), 64, "memory channels")
    return channel_bandwidth(channels, _count(_digits(options["ddr"]), 20_000, "transfers (MT/s)") if "ddr" in options else None)


def _digits(text: str) -> str:
    if not text.isdecimal():
        raise BadInput(f"{text[:30]!r} is not a whole number; write it like channels=12,ddr=4800")
    return text


def _accelerator_node(terms: list[str], options: dict[str, str], own: dict[str, Device]) -> Node:
    devices = tuple(each for term in terms for each in _devices(term, own))
    ram = _size(options["ram"]) if "ram" in options else node_ram_bytes(devices)
    cores = _count(_digits(options["cores"]), MAX_CORES, "cores") if "cores" in options else 0
    node = Node(devices=devices, ram_bytes=ram, disk_bytes=_disk(options), cores=cores, isa=_isa(options))
    bandwidth = _read_bandwidth(options)
    return node if bandwidth is None else msgspec.structs.replace(node, ram_bandwidth=bandwidth)


def _isa(options: dict[str, str]) -> str:
    found = options.get("isa", "").lower()
    if found not in ISA_FACTOR:
        raise UnknownName("instruction set", found, [name for name in ISA_FACTOR if name])
    return found


def _devices(term: str, own: dict[str, Device]) -> tuple[Device, ...]:
    """`2xA100-80GB[70GB]` -> that device, twice."""
    match = _COUNTED.fullmatch(term)
    count_text, name = (match[1], match[2]) if match else ("1", term)
    if _CPU.match(name):
        raise BadInput(f"{term!r}: a node's CPUs are one device and stand alone; write several like 3x(cpu:16,ram=32GB)@1Gb")
    return (_device(name, own),) * _count(count_text, MAX_DEVICES, "devices")


def _device(text: str, own: dict[str, Device] | None = None) -> Device:
    name, cap = _name_and_cap(text)
    if own and name in own:
        return own[name] if cap is None else _with_cap(own[name], cap, own[name].memory_bytes)
    return device(name) if cap is None else _capped(name, cap)


@lru_cache(maxsize=256)
def _capped(name: str, cap_bytes: int) -> Device:
    """Unified memory can be lent beyond the default, but not all of it."""
    found, known = device(name), entry(name)
    shared = (known.host_share_mib or 0) * MIB
    return _with_cap(found, cap_bytes, found.memory_bytes + max(shared - SYSTEM_BYTES, 0))


def _with_cap(found: Device, cap_bytes: int, most_bytes: int) -> Device:
    if cap_bytes > most_bytes * MAX_CAP_EXCESS:
        raise BadInput(f"{found.name}[{format_bytes(cap_bytes)}]: the cap exceeds its memory of {format_bytes(most_bytes)}")
    return found if cap_bytes == found.memory_bytes else msgspec.structs.replace(found, memory_bytes=cap_bytes)


def _disk(options: dict[str, str]) -> int:
    return _size(options["disk"]) if "disk" in options else DISK_BYTES


# --- tokens ----------------------------------------------------------------------------------------------------------


def _name_and_cap(text: str) -> tuple[str, int | None]:
    match = _CAPPED.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"{text.strip()!r} is not a device; {EXAMPLE}")
    return match[1], None if match[2] is None else _size(match[2])


def _count(digits: str, largest: int, what: str) -> int:
    count = int(digits) if len(digits) <= 12 else largest + 1
    if not 1 <= count <= largest:
        raise BadInput(f"{digits[:12]} is not a number of {what} between 1 and {largest:,}")
    return count


def _size(text: str, per_second: bool = False) -> int:
    text = text.strip().removesuffix("/s") if per_second else text.strip()
    size = parse_bytes(text) if len(text) <= 30 else 0
    if not 1 <= size <= MAX_BYTES:
        raise BadInput(f"{text[:30]!r} is not a sensible size; write it like 200GB")
    return size


def _rate(text: str) -> float:
    """Bytes per second, to the kilobit, so that it can be written down again exactly."""
    text = text.strip()
    kilobits = round(parse_bit_rate(text) * 8 / 1e3) if len(text) <= 30 else 0
    if not 1 <= kilobits <= MAX_BYTES // 1000:
        raise BadInput(f"{text[:30]!r} is not a sensible link speed; write it like 400Gb")
    return kilobits * 1e3 / 8


def _latency_seconds(text: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None:
        raise BadInput(f"{text.strip()!r} is not a latency; write it like 5us")
    return round(float(match[1]) * {"ns": 1, "us": 1e3, "ms": 1e6}[match[2]]) / 1e9
