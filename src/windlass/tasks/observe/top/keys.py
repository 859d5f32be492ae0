"""What a key does to what is shown. Pure; cancelling a request is returned, not done."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from windlass.tasks.observe.top.screen import SORTS, Shown, chosen_requests
from windlass.tasks.observe.top.view import RequestView, TopView

Action = Literal["", "quit"] | RequestView
LONGEST, SHORTEST = 60.0, 1.0


def pressed(key: str, shown: Shown, view: TopView) -> tuple[Shown, Action]:
    """`key`: a character, or `up`, `down`, `enter`, `escape`, `backspace`. A RequestView: cancel it."""
    if shown.question:
        return _answered(key, shown, view)
    if shown.is_typing:
        return _typed(key, shown), ""
    shown = replace(shown, message="")
    match key:
        case "q":
            return shown, "quit"
        case "?" | "h":
            return replace(shown, is_help=not shown.is_help), ""
        case " " | "p":
            return replace(shown, is_paused=not shown.is_paused), ""
        case "s":
            return replace(shown, sort=SORTS[(SORTS.index(shown.sort) + 1) % len(SORTS)]), ""
        case "/":
            return replace(shown, is_typing=True, is_help=False), ""
        case "escape":
            return replace(shown, filter="", is_help=False), ""
        case "+":
            return replace(shown, interval=max(shown.interval / 2, SHORTEST)), ""
        case "-":
            return replace(shown, interval=min(shown.interval * 2, LONGEST)), ""
        case "up" | "down":
            return _moved(shown, view, -1 if key == "up" else 1), ""
        case "k":
            return _asked(shown, view), ""
        case _:
            return shown, ""


def _moved(shown: Shown, view: TopView, by: int) -> Shown:
    last = max(len(chosen_requests(view, shown)) - 1, 0)
    return replace(shown, chosen=max(0, min(shown.chosen + by, last)))


def _chosen(shown: Shown, view: TopView) -> RequestView | None:
    rows = chosen_requests(view, shown)
    return rows[min(shown.chosen, len(rows) - 1)] if rows else None


def _asked(shown: Shown, view: TopView) -> Shown:
    """The list stands still while it asks, so that the answer is for the request that was named."""
    row = _chosen(shown, view)
    if row is None:
        return replace(shown, message="there is no request to cancel")
    return replace(shown, question=f"Cancel request {row.number} of {row.owner or 'unknown'} on {row.server}?", is_paused=True)


def _answered(key: str, shown: Shown, view: TopView) -> tuple[Shown, Action]:
    row = _chosen(shown, view)
    after = replace(shown, question="", is_paused=False)
    return (after, row) if key in ("y", "Y") and row is not None else (after, "")


def _typed(key: str, shown: Shown) -> Shown:
    if key == "enter":
        return replace(shown, is_typing=False)
    if key == "escape":
        return replace(shown, is_typing=False, filter="")
    if key == "backspace":
        return replace(shown, filter=shown.filter[:-1])
    return replace(shown, filter=shown.filter + key, chosen=0) if len(key) == 1 and key.isprintable() else shown
