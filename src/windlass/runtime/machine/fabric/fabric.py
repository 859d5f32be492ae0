"""InfiniBand and Ethernet ports of this machine, from /sys. Pure but for the reader that is passed in."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from windlass.core.model import Frozen
from windlass.runtime.machine.proc import ReadText, read_text

ListNames = Callable[[str], list[str]]
"""A folder -> the names in it; empty if it cannot be read."""


class HcaPort(Frozen):
    """One port of a host channel adapter (InfiniBand or RoCE)."""

    device: str
    """mlx5_0"""
    port: int
    state: str
    """ACTIVE, DOWN, INIT, ..."""
    link_layer: str
    """InfiniBand or Ethernet (RoCE)."""
    gigabits: float

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


class Interface(Frozen):
    """A network interface with an IPv4 address."""

    name: str
    address: str
    mtu: int = 0
    megabits: int = 0
    """0: not reported (virtual interfaces)."""
    is_up: bool = True


class Fabric(Frozen):
    ports: tuple[HcaPort, ...] = ()
    interfaces: tuple[Interface, ...] = ()

    def interface_of(self, address: str) -> Interface | None:
        return next((one for one in self.interfaces if one.address == address), None)

    @property
    def active_ports(self) -> tuple[HcaPort, ...]:
        return tuple(port for port in self.ports if port.is_active)


def read_fabric(
    read: ReadText = read_text, names: ListNames | None = None, address_of: Callable[[str], str] | None = None
) -> Fabric:
    names, address_of = names or list_names, address_of or interface_address
    return Fabric(ports=_ports(read, names), interfaces=_interfaces(read, names, address_of))


def list_names(folder: str) -> list[str]:
    with suppress(OSError):
        return sorted(path.name for path in Path(folder).iterdir())
    return []


def _ports(read: ReadText, names: ListNames) -> tuple[HcaPort, ...]:
    root, found = "/sys/class/infiniband", list[HcaPort]()
    for device in names(root):
        for port in names(f"{root}/{device}/ports"):
            at = f"{root}/{device}/ports/{port}"
            found.append(
                HcaPort(
                    device=device,
                    port=int(port) if port.isdecimal() else 0,
                    state=read(f"{at}/state").partition(":")[2].strip() or "unknown",
                    link_layer=read(f"{at}/link_layer").strip() or "unknown",
                    gigabits=rate_gigabits(read(f"{at}/rate")),
                )
            )
    return tuple(found)


def rate_gigabits(text: str) -> float:
    """`400 Gb/sec (4X NDR)` -> 400."""
    match = re.match(r"\s*([\d.]+)\s*Gb", text)
    return float(match[1]) if match else 0.0


def _interfaces(read: ReadText, names: ListNames, address_of: Callable[[str], str]) -> tuple[Interface, ...]:
    root, found = "/sys/class/net", list[Interface]()
    for name in names(root):
        address = address_of(name)
        if not address or address.startswith("127."):
            continue
        found.append(
            Interface(
                name=name,
                address=address,
                mtu=_number(read(f"{root}/{name}/mtu")),
                megabits=max(_number(read(f"{root}/{name}/speed")), 0),
                is_up=read(f"{root}/{name}/operstate").strip() != "down",
            )
        )
    return tuple(found)


def _number(text: str) -> int:
    stripped = text.strip()
    return int(stripped) if stripped.removeprefix("-").isdecimal() else 0


SIOCGIFADDR = 0x8915
"""linux/sockios.h"""


def interface_address(name: str) -> str:
    """Its first IPv4 address; empty without one."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):
        answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def address_towards(host: str) -> str:
    """The local address that the kernel would use to reach `host`; nothing is sent. Empty if there is no route."""
    with suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asked:
            asked.connect(target)
            return str(asked.getsockname()[0])
    return ""
