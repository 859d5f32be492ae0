"""Table of cloud offers, cheapest first."""

from __future__ import annotations

from rich.table import Table

from windlass.core.plan import CloudOffer
from windlass.units import format_rate, format_seconds

SHOWN = 12


def cloud_table(offers: tuple[CloudOffer, ...]) -> Table:
    more = f" (the {SHOWN} cheapest of {len(offers)}; all with --json)" if len(offers) > SHOWN else ""
    title = f"\ncloud offers{more}"
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title=title, title_style="bold")
    rows = [_run_cells(offer) if offer.run_usd is not None else _cells(offer) for offer in offers[:SHOWN]]
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if name in ("provider", "devices", "how", "priced") else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def _shared(offer: CloudOffer) -> dict[str, str]:
    flags = (" stale" if offer.stale else "") + ("" if offer.verified else " unverified")
    return {
        "provider": offer.provider + (" spot" if offer.spot else ""),
        "devices": f"{offer.num_devices}x{offer.device}",
        "$/h": f"{offer.usd_per_hour:,.2f}",
        "priced": offer.priced_at + flags,
        "storage $/month": f"{offer.storage_usd_per_month:,.2f}",
    }


def _cells(offer: CloudOffer) -> dict[str, str]:
    return {
        **_shared(offer),
        "how": f"{offer.scheme}, {offer.layout}",
        "tokens/s": format_rate(offer.decode_tokens_per_second),
        "$/M tokens": f"{offer.usd_per_million_output_tokens:,.2f}",
        "download + convert": format_seconds(3600 * (offer.download_hours + offer.convert_hours)),
        "break-even": f"{offer.break_even_hours:,.0f} h" if offer.break_even_hours else "-",
    }


def _run_cells(offer: CloudOffer) -> dict[str, str]:
    return {
        **_shared(offer),
        "how": offer.layout,
        "days": f"{offer.run_days or 0:,.1f}",
        "$ for the run": f"{offer.run_usd or 0:,.0f}",
        "break-even": f"{offer.break_even_hours:,.0f} h" if offer.break_even_hours else "-",
    }
