"""Results of gate and up that are rounded for the next product have its inputs, with zeros where these fill up blocks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.integer_units import SHAPES  # noqa: E402
from windlass.kernels.cuda import int8, layout, route  # noqa: E402

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


@pytest.mark.parametrize("blocks", [3, 17, 76])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_they_have_as_many_inputs_as_the_next_product(blocks: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    width = blocks * 128
    gate_up = layout.empty(1, 2 * width, 256, 128, paired=True, device=CPU)
    down = layout.empty(1, 256, width, 128, device=CPU)
    written: list[Any] = []

    def made(_x: Any, _weight: Any, out: Any, *_: Any, **__: Any) -> Any:
        written.append(out)
        if isinstance(out, int8.RoundedRows):
            out.codes[:, :width] = 1
            out.scales[:, :blocks] = 1
        else:
            out[:, :width] = 1
        return out

    monkeypatch.setattr(int8, "gate_up", made)
    monkeypatch.setattr(int8, "quantize_rows", lambda x: int8.RoundedRows(x, torch.ones(len(x), x.shape[1] // 128)))
    routes = route.all_rows(5, size, CPU)
    found = int8.gate_up_rounded(int8.empty_rows(5, 256, CPU), gate_up, down.width, 5, routes, shape=SHAPES[size])
    assert found.codes.shape == (5, down.width) and found.scales.shape == (5, down.width // 128)
    assert not found.codes[:, width:].any() and found.codes[:, :width].all()
    assert len(written) == 1
