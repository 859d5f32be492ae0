"""`windlass devices`: the accelerators that `--on` knows by name."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from windlass.cli.console import console
from windlass.core.hardware.devices import catalog, device
from windlass.errors import BadInput
from windlass.units import format_bytes


def rows(filter_by: str) -> list[dict[str, Any]]:
    """Devices whose name or alias contains the text, smallest memory first; `rtx 4090` and `rtx4090` are RTX-4090."""
    wanted = _letters(filter_by)
    found = [name for name, entry in catalog().items() if any(wanted in _letters(text) for text in (name, *entry.aliases))]
    return sorted((_row(name) for name in found), key=lambda row: (row["memory_bytes"], row["name"]))


def _letters(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


def _row(name: str) -> dict[str, Any]:
    found, entry = device(name), catalog()[name]
    return {
        "name": name,
        "kind": found.kind,
        "memory_bytes": found.memory_bytes,
        "bandwidth_bytes_per_second": found.bandwidth,
        "bf16_flops": found.flops.get("bf16"),
        "link": found.link_name or None,
        "watts": found.watts,
        "aliases": list(entry.aliases),
    }


def show(filter_by: str, as_json: bool) -> None:
    found = rows(filter_by)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    if not found:
        raise BadInput(f"no known device contains {filter_by!r}; `windlass devices` lists all")
    console().print(_table(found))
    console().print(
        f"\n{len(found)} device{'s' if len(found) > 1 else ''}. `windlass plan MODEL --on 2xH100-80GB` plans for them; several machines: "
        '--on "4x(8xH100-80GB)@400Gb"; CPUs: --on "3x(cpu:16,ram=32GB)@1Gb".',
        markup=False,
    )


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("device", "memory", "bandwidth", "bf16", "link", "watts", "also called"):
        table.add_column(
            name, justify="right" if name in ("memory", "bandwidth", "bf16", "watts") else "left", no_wrap=name == "device"
        )
    for row in found:
        flops = row["bf16_flops"]
        table.add_row(
            row["name"],
            format_bytes(row["memory_bytes"]),
            f"{row['bandwidth_bytes_per_second'] / 1e12:.2f} TB/s",
            f"{flops / 1e12:,.0f} TFLOP/s" if flops else "-",
            row["link"] or "-",
            f"{row['watts']:.0f}",
            ", ".join(row["aliases"][:3]),
        )
    return table
