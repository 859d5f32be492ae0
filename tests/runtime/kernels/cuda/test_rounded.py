"""Results of gate and up that are rounded for the next product have its inputs, with zeros where these fill up blocks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.integer_units import UNIT_KINDS, Cut  # noqa: E402
from windlass.runtime.kernels.cuda import int8, layout, route  # noqa: E402

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
ROWS = 5


@pytest.mark.parametrize("width", [3 * 128, 17 * 128, 2112])
@pytest.mark.parametrize("dense", [False, True])
def test_they_have_as_many_inputs_as_the_next_product(width: int, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = layout.empty(1, 2 * width, 256, 128, paired=True, device=CPU)
    down = layout.empty(1, 256, -(-width // 128) * 128, 128, device=CPU)

    def made(_kind: int, _x: Any, _weight: Any, out: Any, *_: Any) -> Any:
        out[:, :width] = 1
        return out

    monkeypatch.setattr(int8, "_all_rows" if dense else "_experts", made)
    monkeypatch.setattr(int8, "quantize_rows", lambda x: int8.RoundedRows(x, torch.ones(len(x), x.shape[1] // 128)))
    x = int8.empty_rows(ROWS, 256, CPU)
    if dense:
        found = int8.dense_gate_up_rounded(x, gate_up, down.width, Cut(64, UNIT_KINDS[3].shape, 1, 0.0))
    else:
        found = int8.gate_up_rounded(x, gate_up, down.width, ROWS, route.all_rows(ROWS, 64, CPU))
    assert found.codes.shape == (ROWS, down.width) and found.scales.shape == (ROWS, down.width // 128)
    assert not found.codes[:, width:].any() and found.codes[:, :width].all()
