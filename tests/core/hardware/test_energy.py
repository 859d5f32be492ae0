from __future__ import annotations

import pytest

from windlass.core.hardware.energy import co2_kg, energy_kwh, grid, regions
from windlass.errors import BadInput, UnknownName

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("hours", "mwh", "tonnes"), [(1_022_362, 449.8, 173.2), (530_432, 233, 90), (135_168, 59, 23), (82_432, 36, 14)]
)
def test_llama_table_15(hours: float, mwh: float, tonnes: float) -> None:
    """arXiv 2302.13971: 400 W, PUE 1.1, 0.385 kg per kWh. The table rounds (and prints 65B's 449.8 as 449)."""
    kwh = energy_kwh(hours, watts=400, pue=1.1)
    assert kwh / 1000 == pytest.approx(mwh, rel=0.012)
    assert co2_kg(kwh, 385) / 1000 == pytest.approx(tonnes, rel=0.015)


def test_llama_65b_to_the_digit() -> None:
    kwh = energy_kwh(1_022_362, 400, 1.1)
    assert (round(kwh / 1000, 1), round(co2_kg(kwh, 385) / 1000, 1)) == (449.8, 173.2)


@pytest.mark.parametrize(("hours", "tonnes"), [(1.46e6, 420), (7.0e6, 2040), (30.84e6, 8930)])
def test_llama_3_1_cards_agree_with_one_intensity(hours: float, tonnes: float) -> None:
    """The cards give hours at 700 W and tonnes; both together imply 0.411 to 0.416 kg per kWh with the building's share in it."""
    assert co2_kg(energy_kwh(hours, 700, pue=1.0), 414) / 1000 == pytest.approx(tonnes, rel=0.01)


@pytest.mark.parametrize(
    ("region", "grams"),
    [
        ("FRA", 56.0),
        ("france", 56.0),
        ("fr", 56.0),
        ("USA", 369.5),
        ("us-central1", 430),
        ("europe-west9", 34),
        ("world", 475),
        (" POL ", 661.9),
    ],
)
def test_grid(region: str, grams: float) -> None:
    assert grid(region).grams_per_kwh == grams


def test_every_region_has_a_source() -> None:
    assert all(grid(region).source and grid(region).grams_per_kwh > 0 for region in regions())
    assert grid().name == "world" and grid().year == 2019


def test_refusals() -> None:
    with pytest.raises(UnknownName, match="FRA"):
        grid("FRB")
    with pytest.raises(BadInput, match="PUE"):
        energy_kwh(1, 1, pue=0.9)
    with pytest.raises(BadInput, match="negative"):
        energy_kwh(-1, 1)
