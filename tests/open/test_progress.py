"""Progress bars say nothing that is not known."""

from __future__ import annotations

import io

import pytest

from windlass.open.progress import size_columns

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("total", "expected"), [(None, ""), (2_000_000, "1.0/2.0 MB")])
def test_bytes_are_shown_once_the_total_is_known(total: int | None, expected: str) -> None:
    from rich.console import Console
    from rich.progress import Progress

    bars = Progress(*size_columns(), console=Console(file=io.StringIO()))
    bars.add_task("loading", total=total, completed=0 if total is None else 1_000_000)
    shown = "".join(str(column(bars.tasks[0])) for column in bars.columns)
    assert shown.startswith(expected) and ("?" not in shown or total is not None)
