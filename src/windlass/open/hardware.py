"""The hardware to plan for: the HARDWARE argument, or this machine."""

from __future__ import annotations

from windlass.core.hardware.spec import Hardware


def resolve_hardware(text: str | None) -> Hardware:
    if text is not None:
        from windlass.core.hardware.parse import parse_hardware

        return parse_hardware(text)
    from windlass.machine.probe import probe

    return probe()
