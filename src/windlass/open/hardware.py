"""The hardware to plan for: the HARDWARE argument, or this machine."""

from __future__ import annotations

from pathlib import Path

from windlass.core.hardware.spec import Hardware
from windlass.errors import BadInput


def resolve_hardware(text: str | None) -> Hardware:
    if text is not None:
        from windlass.core.hardware.parse import parse_hardware

        return parse_hardware(text)
    from windlass.runtime.machine.probe import probe

    return probe()


def machines_like(hardware: Hardware, number: int) -> Hardware:
    """Several machines like this one, as a job over nodes has them."""
    import msgspec

    from windlass.core.hardware.defaults import network_bandwidth, usual_latency
    from windlass.core.hardware.notation import describe

    bandwidth = network_bandwidth(hardware.nodes)
    several = msgspec.structs.replace(
        hardware,
        nodes=hardware.nodes * number,
        network_bandwidth=bandwidth,
        network_latency_seconds=usual_latency(bandwidth),
    )
    return msgspec.structs.replace(several, description=describe(several))


def shared_by(hardware: Hardware, nproc: int) -> Hardware:
    """The devices of this machine that so many processes use: one each, or equal shares of its CPUs, between which memory is the link."""
    import msgspec

    from windlass.core.hardware.notation import describe

    (node,) = hardware.nodes
    if nproc == len(node.devices):
        return hardware
    first, text = node.devices[0], hardware.description
    if first.kind in ("cuda", "rocm"):
        devices = node.devices[:nproc]
        text = describe(msgspec.structs.replace(hardware, nodes=(msgspec.structs.replace(node, devices=devices),)))
    else:
        share = msgspec.structs.replace(
            first,
            memory_bytes=first.memory_bytes // nproc,
            bandwidth=first.bandwidth / nproc,
            measured_bandwidth=first.measured_bandwidth / nproc,
            flops={name: rate / nproc for name, rate in first.flops.items()},
            measured_flops={name: rate / nproc for name, rate in first.measured_flops.items()},
            link_bandwidth=first.measured_bandwidth / nproc / 2,  # a copy reads and writes
        )
        devices = (share,) * nproc
    return msgspec.structs.replace(hardware, nodes=(msgspec.structs.replace(node, devices=devices),), description=text)


def most_processes(hardware: Hardware) -> int | None:
    """Of each machine: one for every GPU; None: any number share its CPUs."""
    device = hardware.nodes[0].devices[0]
    return len(hardware.nodes[0].devices) if device.kind in ("cuda", "rocm") else None


def with_disk(hardware: Hardware, folder: Path) -> Hardware:
    """This machine, with the free space and the measured speed of a folder's disk."""
    import shutil

    import msgspec

    from windlass.runtime.machine.disk import read_speed

    if not folder.is_dir():
        raise BadInput(f"--disk-folder {folder} is not a folder; create it, or name one on a fast local disk")
    try:
        free, speed = shutil.disk_usage(folder).free, read_speed(folder)
    except OSError as error:
        raise BadInput(f"--disk-folder {folder} cannot be used: {error.strerror}") from None
    nodes = tuple(msgspec.structs.replace(node, disk_bytes=free, disk_bandwidth=speed) for node in hardware.nodes)
    return msgspec.structs.replace(hardware, nodes=nodes)
