"""Layers that are copied ahead, two buffers for all: whatever the copies' pace, a layer finds its weights, and no copy disturbs one that computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from windlass.runtime.kernels.cuda.ahead import BUFFERS, CopyAhead, DirectLane

pytestmark = pytest.mark.cpu


class Late:
    """Copies run as late as events allow, or as early, as drawn. A copy waits for what was marked as used before it began."""

    def __init__(self, draws: Callable[[], bool]) -> None:
        self._draws, self._waiting = draws, list[tuple[int, int, Callable[[], None]]]()
        self.computing: int | None = None
        """The buffer that is read by what was launched and not marked as used yet."""
        self._launched = 0
        self._used = [0] * BUFFERS

    def mark_used(self, buffer: int) -> None:
        self._launched += 1
        self._used[buffer] = self._launched
        if self.computing == buffer:
            self.computing = None

    def run(self, buffer: int, copy: Callable[[], None]) -> None:
        assert self._used[buffer], "a copy that nothing orders"
        self._waiting.append((buffer, self._used[buffer], copy))
        while self._waiting and self._draws():
            self._next()

    def wait(self, buffer: int) -> None:
        while any(at == buffer for at, _, _ in self._waiting):
            self._next()

    def settle(self) -> None:
        while self._waiting:
            self._next()

    def _next(self) -> None:
        buffer, _, copy = self._waiting.pop(0)
        assert buffer != self.computing, "copied over weights that are being read"
        copy()


@given(st.integers(1, 7), st.lists(st.booleans(), max_size=40), st.data())
def test_every_layer_finds_its_weights(num_layers: int, early: list[bool], data: st.DataObject) -> None:
    pace = iter(early)
    lane = Late(lambda: next(pace, False))
    ahead, buffers = CopyAhead(range(num_layers), lane), [-1] * BUFFERS

    def copy(layer: int) -> None:
        buffers[layer % BUFFERS] = layer

    for _ in range(3):
        stops = data.draw(st.integers(0, 2 * num_layers))  # half layers until an exception; all: none
        for layer in range(num_layers):
            if stops == 2 * layer:
                break
            ahead.before(layer, copy)
            lane.computing = layer % BUFFERS
            assert buffers[layer % BUFFERS] == layer
            if stops == 2 * layer + 1:
                break
            ahead.after(layer, copy)
        was_cut = 0 < stops < 2 * num_layers
        lane.computing = None
        assert ahead.abandon() == was_cut
        if was_cut:
            before = list(buffers)
            lane.settle()
            assert buffers == before, "copies that come after the step was given up"


def test_shapes_alone_copy_nothing() -> None:
    ahead = CopyAhead(range(2), None)
    ahead.before(0, lambda _: pytest.fail("nothing to copy"))
    ahead.after(0, lambda _: pytest.fail("nothing to copy"))
    assert not ahead.abandon()


def test_on_a_cpu_copies_are_made_at_once() -> None:
    made: list[int] = []
    ahead = CopyAhead(range(3), DirectLane())
    for layer in range(3):
        ahead.before(layer, made.append)
        assert layer in made
        ahead.after(layer, made.append)
    assert made == [0, 1, 2] and not ahead.abandon()
