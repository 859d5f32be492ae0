"""Stopped in one layout, gone on with in another: one process to four, and four to one. Losses to 1e-9, in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from processes import exit_codes  # noqa: E402
from spread_rank import CHANGES, LIMIT, STEPS, go_on, resume_rank, save, trained  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

OF_FOUR = {
    "fsdp4": {"fsdp": 4},
    "fsdp2 x tp2": {"fsdp": 2, "tp": 2},
    "tp4, heads of keys shared": {"tp": 4},
    "fsdp2 x ep2": {"fsdp": 2, "ep": 2},
    "tp2 x pp2": {"tp": 2, "pp": 2},
}
# Seven heads' worth of channels do not divide by four: slices are of unlike size.
UNEVEN = CHANGES | {"intermediate_size": 15, "moe_intermediate_size": 7, "num_hidden_layers": 2}


def test_other_layouts(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = trained({}, "glm4_moe", UNEVEN)
    losses = [whole.step().loss for _ in range(STEPS // 3)]
    save(whole, tmp_path / "alone")
    losses += [whole.step().loss for _ in range(2 * STEPS // 3)]
    torch.save(losses, tmp_path / "losses.pt")
    assert exit_codes(4, resume_rank, str(tmp_path), OF_FOUR, "glm4_moe", UNEVEN) == [0] * 4
    for label in OF_FOUR:
        trainer = trained({}, "glm4_moe", UNEVEN)
        go_on(trainer, tmp_path / label)
        assert trainer.progress.step == 2 * STEPS // 3
        found = [trainer.step().loss for _ in range(STEPS // 3)]
        assert max(abs(one - other) for one, other in zip(found, losses[2 * STEPS // 3 :], strict=True)) < LIMIT, label
