"""With weights on disk, tokens and log-probabilities are the same to the last bit, for every family and any placement."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from small_models import FAMILIES, answers, demand, expected, launch, placed  # noqa: E402

from windlass.core.tiers.values import TierPlacement  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402

pytestmark = pytest.mark.cpu


def check(name: str, tiers: TierPlacement, folder: Path, how: str = "bf16") -> None:
    engine, info = load_model(launch(name, folder, (tiers,), how))
    decoder = engine.runner.decoder
    assert answers(engine) == expected(name, how)
    assert "offload" in info.details
    stats = decoder.tier.stats()  # type: ignore[attr-defined]
    assert stats.read_bytes > 0
    stream = decoder.tier.stream  # type: ignore[attr-defined]
    assert stream is None or stream.num_restarts == 0, "matrices are read in the order in which they are used"
    if tiers.disk_experts:
        assert stats.expert_misses > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_on_disk(name: str, tmp_path: Path) -> None:
    found = demand(name)
    check(name, placed(name, frozenset(range(len(found.units))), slots=2), tmp_path)


@pytest.mark.parametrize("name", ["glm4_moe", "llama"])
def test_without_compiled_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_NO_NATIVE", "1")
    found = demand(name)
    tiers = placed(name, frozenset(range(len(found.units))), slots=3)
    assert answers(load_model(launch(name, tmp_path, (tiers,)))[0]) == answers(load_model(launch(name))[0])


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", FAMILIES)
def test_any_placement(name: str, tmp_path: Path, data: st.DataObject) -> None:
    found = demand(name)
    units = data.draw(st.frozensets(st.sampled_from(range(len(found.units)))))
    most = found.experts.num_experts if found.experts else 0
    slots = data.draw(st.integers(0, most))
    if units or slots:
        check(name, placed(name, units, slots), tmp_path)
