from __future__ import annotations

import pytest

from windlass.core.hardware.devices import names
from windlass.tasks.plan.cost.prices import device_price_per_hour, offers, purchase_price, storage_prices

pytestmark = pytest.mark.pure


def test_every_offer_is_complete() -> None:
    for offer in offers():
        assert offer.device in names()
        assert offer.usd_per_hour > 0 and offer.num_devices >= 1
        assert offer.source and len(offer.date) == 10
    assert {offer.provider for offer in offers()} == {"AWS", "GCP", "Azure", "Lambda", "RunPod", "Nebius", "Vast", "Colab"}


def test_stale_is_more_than_a_year_before_the_newest() -> None:
    stale = {offer.provider for offer in offers() if offer.stale}
    assert stale == {"Azure", "Vast", "Colab"}


@pytest.mark.parametrize(
    ("device", "usd", "provider"),
    [
        ("H100", 3.29, "RunPod"),  # Vast's 1.80 is stale, Nebius' 2.15 is spot
        ("H200", 4.50, "Nebius"),
        ("B200", 6.69, "Lambda"),
        ("A100-40GB", 1.99, "Lambda"),  # Colab's is not verified
        ("4090", 0.74, "RunPod"),
        ("H100-NVL", 6.98, "Azure"),  # stale, and all there is
    ],
)
def test_cheapest_on_demand(device: str, usd: float, provider: str) -> None:
    found = device_price_per_hour(device)
    assert found is not None
    assert (pytest.approx(found[0]), found[1].provider) == (usd, provider)


def test_no_price_is_none() -> None:
    assert device_price_per_hour("H800") is None
    assert device_price_per_hour("cpu:16") is None
    assert purchase_price("V100") is None


def test_whole_instances() -> None:
    gcp = {offer.instance: offer for offer in offers() if offer.provider == "GCP"}
    assert gcp["a3-highgpu-8g"].usd_per_hour == pytest.approx(78.37 + 9.46)
    assert gcp["a3-ultragpu-8g"].usd_per_device_hour == pytest.approx(86.76 / 8)


def test_purchase_and_storage() -> None:
    bought = purchase_price("h100")
    assert bought is not None and bought.usd == 30000 and "UNVERIFIED" in bought.source
    assert all(storage.usd_per_gb_month > 0 and storage.source for storage in storage_prices())
