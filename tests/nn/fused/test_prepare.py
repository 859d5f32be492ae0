"""Before the first request: everything that steps need is made once, with as few of them as do it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
HERE = str(Path(__file__).parents[1])
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from stand_ins import StandIns  # noqa: E402
from tiny_fused import weights_of  # noqa: E402

from windlass.kernels.cuda import driver  # noqa: E402
from windlass.nn import Decoder  # noqa: E402
from windlass.nn.fused.decoder import FusedDecoder  # noqa: E402
from windlass.nn.fused.prompts import padded_rows, planned_rows  # noqa: E402

pytestmark = pytest.mark.cpu

NEEDS = {1: {"a"}, 2: {"a", "b"}, 3: {"b"}, 5: {"b", "c"}, 6: {"a", "c"}}
"""Of steps, by their rows."""


class Noting:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.run: list[int] = []
        self.compiled: set[Any] = set()
        self._collected: driver.Collected | None = None
        real = FusedDecoder._passed

        def passed(fused: FusedDecoder, step: Any, caches: Any) -> Any:
            rows = step.tokens.shape[0]
            if self._collected is None:
                self.run.append(rows)
            else:
                self._collected.needs |= NEEDS[rows]
                self._collected.add(driver.Unit(f"rows {rows}", (), 0))
            return real(fused, step, caches)

        patch.setattr(FusedDecoder, "_passed", passed)
        patch.setattr(FusedDecoder, "_compile_begun", lambda *_: None)
        patch.setattr(FusedDecoder, "_integer_kernels", lambda *_: set())
        patch.setattr(driver, "collecting", self._collecting)
        patch.setattr(driver, "compile_all", self.compiled.update)

    @contextmanager
    def _collecting(self) -> Iterator[driver.Collected]:
        self._collected = driver.Collected()
        yield self._collected
        self._collected = None


def prepared(name: str, tiny: Any, patch: pytest.MonkeyPatch) -> tuple[bool, Noting]:
    StandIns(torch.float32).install(patch)
    spec, weights, _ = weights_of(name)
    decoder, noting = Decoder(spec, weights), Noting(patch)
    steps = [tiny.step([tiny.chunk([1], 0, 1, [number]) for number in range(rows)]) for rows in NEEDS]
    with torch.inference_mode():
        return decoder.prepare(64, steps, decoder.make_caches(16, torch.float32)), noting


def test_a_step_runs_if_it_needs_something_new(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done, noting = prepared("llama+128", tiny, monkeypatch)
    assert done and noting.run == [1, 2, 5]
    assert {unit.name for unit in noting.compiled} == {f"rows {rows}" for rows in NEEDS}


def test_without_integer_products_steps_are_tried_later(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of their prompts are compiled at the first use."""
    done, noting = prepared("llama", tiny, monkeypatch)
    assert not done and not noting.run and noting.compiled


@pytest.mark.parametrize("most", [1, 256, 300, 2048, 3000, 8192])
def test_attention_is_planned_for_all_usual_lengths(most: int) -> None:
    found = planned_rows(most)
    assert {padded_rows(rows) for rows in range(1, min(most, 2048) + 1)} <= set(found)
    assert all(padded_rows(rows) == rows <= padded_rows(most) for rows in found) and len(found) == len(set(found)) < 16
