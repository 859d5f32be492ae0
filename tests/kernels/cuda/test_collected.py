"""What launches need is noted instead of launched: what is to be compiled, and what is made at a first launch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from windlass.kernels.cuda import driver  # noqa: E402

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "kernel", driver.kernel.__wrapped__)
    monkeypatch.setattr(driver, "_make_rows_map", lambda *_: torch.zeros(1))
    monkeypatch.setattr(driver, "_maps", {})


def test_functions_of_one_unit_are_noted_apart() -> None:
    """One of them may have been launched, and the other not."""
    first, second = (
        driver.kernel("small.cu", "PI", name, packed=False, EXPERTS=8) for name in ("dispatch_count", "dispatch_fill")
    )
    with driver.collecting() as found:
        first((1,), 32, None, 1)
    with driver.collecting() as other:
        second((1,), 32, None, 1)
    assert found == other == {first.unit}
    assert found.needs and other.needs and not found.needs & other.needs


def test_maps_are_noted_whether_they_are_there_or_not() -> None:
    """A kernel that was launched with one matrix may come with another."""
    one, two = torch.zeros(2, 1, 16, 4, 64, dtype=torch.uint8)
    noted = []
    for data, rows in ((one, 8), (two, 8), (one, 16), (one, 8)):
        with driver.collecting() as found:
            driver.rows_map(data, rows)
        assert not found and len(found.needs) == 1
        noted.append(found.needs)
    assert noted[0] == noted[3] and noted[0] != noted[1] and noted[0] != noted[2]


def test_sources_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the definitions; another text, and other definitions, are other kernels."""
    assert driver._digest("a") == driver._digest("a") != driver._digest("b")
    assert driver._digest.cache_info().hits
