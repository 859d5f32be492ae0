"""A worker's hardware, for the planner. Memory bandwidth is measured for a tenth of a second, once per boot."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from windlass.errors import UnknownName
from windlass.runtime.fleet.protocol.messages import ProbeAnswer
from windlass.runtime.machine.bandwidth import read_bandwidth
from windlass.runtime.machine.gpus import gpu_device, this_machines_gpus
from windlass.runtime.machine.probe import cache_key
from windlass.runtime.machine.system import this_system

SIOCGIFADDR = 0x8915
"""linux/sockios.h: the IPv4 address of an interface."""
NAME_BYTES, IFREQ_BYTES = 15, 256


def probe_answer(device: str, address: str) -> ProbeAnswer:
    system = this_system()
    return ProbeAnswer(
        name=socket.gethostname(),
        address=address,
        num_cores=system.num_cores,
        free_bytes=system.ram_bytes,
        bandwidth=read_bandwidth(system.num_cores, cache_key(system)) or 0.0,
        device=device,
        gpus=() if device == "cpu" else tuple(gpu_device(gpu) for gpu in this_machines_gpus()),
    )


def address_of(interface: str) -> str:
    """`eth0` -> 10.0.0.7."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise UnknownName("network interface", interface, names)
    return _ipv4(interface) or _ipv6(interface) or _none(interface)


def _ipv4(interface: str) -> str:
    import fcntl  # not on every system

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack(f"{IFREQ_BYTES}s", interface[:NAME_BYTES].encode()))
        return socket.inet_ntoa(found[20:24])
    return ""


def _ipv6(interface: str) -> str:
    """Not link-local: such an address is only valid together with an interface."""
    with suppress(OSError), open("/proc/net/if_inet6") as table:  # noqa: PTH123 - not a file to keep a path of
        for line in table:
            digits, *_, name = line.split()
            if name == interface and not digits.startswith("fe80"):
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def _none(interface: str) -> str:
    from windlass.errors import Impossible

    raise Impossible(f"the network interface {interface} has no address; give it one, or name another with --interface")
