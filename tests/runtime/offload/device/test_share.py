"""The CPU's share of experts in host memory, against plain products of the same weights."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from torch import Tensor

from waiting import until
from windlass.runtime.kernels import build
from windlass.runtime.kernels.cuda import layout
from windlass.runtime.kernels.cuda.layout import Tiles, dequantize
from windlass.runtime.kernels.cuda.tiered import (
    GUESSES_AT,
    ITEM_BYTES,
    ITEMS_AT,
    MAX_GUESSES,
    ROWS_AT,
    TOLD_AT,
    mailbox_bytes,
    sums_at,
)
from windlass.runtime.offload.device.share import CpuShare, library

pytestmark = pytest.mark.cpu

HIDDEN, WIDTH, EXPERTS = 512, 384, 6


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    found = library()
    if found is None and shutil.which("g++") is None:
        pytest.skip("no compiler")
    assert found is not None, build.why_not("tiles")
    return found


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("level", [0, 1], ids=["plain", "best"])
def test_product_of_a_tile(lib: ctypes.CDLL, group: int, level: int) -> None:
    tiles = layout.random(1, 16, HIDDEN, group, 1.0, device="cpu", seed=group)
    x = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    out = torch.empty(16)
    lib.tiles_product(
        ctypes.c_void_p(tiles.data.data_ptr()),
        HIDDEN // 128,
        group,
        ctypes.c_void_p(x.data_ptr()),
        level,
        ctypes.c_void_p(out.data_ptr()),
    )
    expected = dequantize(tiles, torch.float64)[0] @ x.double()
    assert (out - expected).norm() / expected.norm() < 1e-4


class Asked:
    """A mailbox as the device fills it."""

    def __init__(
        self, layers: list[tuple[Tiles, Tiles]], blocks: int, threads: int, plain: bool = False, ahead_bytes: int | None = None
    ) -> None:
        self.mailbox = torch.zeros(mailbox_bytes(HIDDEN) + 64, dtype=torch.uint8)
        self.mailbox = self.mailbox[-self.mailbox.data_ptr() % 64 :][: mailbox_bytes(HIDDEN)]
        gate_up, down = [first.data for first, _ in layers], [second.data[:, :, :blocks].contiguous() for _, second in layers]
        self.share = CpuShare(
            gate_up, down, layers[0][0], self.mailbox, blocks, threads=threads, ahead_bytes=ahead_bytes, plain=plain
        )

    def ask(self, layer: int, x: Tensor, items: list[tuple[int, list[int], list[float]]]) -> Tensor:
        """Items: expert, rows, weights."""
        head = torch.tensor([x.shape[0], len(items), layer], dtype=torch.int32)
        self.mailbox[4:16].view(torch.int32).copy_(head)
        for number, (expert, rows, weights) in enumerate(items):
            at = ITEMS_AT + number * ITEM_BYTES
            padding = 8 - len(rows)
            self.mailbox[at : at + 40].view(torch.int32).copy_(torch.tensor([expert, len(rows), *rows, *[-1] * padding]))
            self.mailbox[at + 40 : at + 72].view(torch.float32).copy_(torch.tensor([*weights, *[0.0] * padding]))
        self.mailbox[ROWS_AT : ROWS_AT + x.numel() * 2].view(torch.bfloat16).copy_(x.flatten())
        self.share.ask()
        start = sums_at(HIDDEN)
        return self.mailbox[start : start + x.numel() * 4].view(torch.float32).view(x.shape).clone()


def made(seed: int, group: int = 128) -> tuple[Tiles, Tiles]:
    return (
        layout.random(EXPERTS, 2 * WIDTH, HIDDEN, group, HIDDEN**-0.5, paired=True, device="cpu", seed=seed),
        layout.random(EXPERTS, HIDDEN, WIDTH, group, WIDTH**-0.5, device="cpu", seed=seed + 1),
    )


def reference(layer: tuple[Tiles, Tiles], blocks: int, x: Tensor, items: list[tuple[int, list[int], list[float]]]) -> Tensor:
    gate_up, down = (dequantize(tiles, torch.float64) for tiles in layer)
    out = torch.zeros(x.shape, dtype=torch.float64)
    width = blocks * 128
    for expert, rows, weights in items:
        for row, weight in zip(rows, weights, strict=True):
            y = gate_up[expert] @ x[row].double()
            act = torch.nn.functional.silu(y[:WIDTH]) * y[WIDTH:]
            out[row] += weight * (down[expert][:, :width] @ act[:width])
    return out


@pytest.mark.parametrize(("threads", "group", "plain"), [(1, 64, False), (2, 128, False), (3, 128, True)])
def test_answers_every_question(lib: ctypes.CDLL, threads: int, group: int, plain: bool) -> None:
    del lib
    layers = [made(1, group), made(11, group)]
    asked = Asked(layers, 2, threads, plain)
    source = torch.Generator().manual_seed(3)
    questions = [
        (0, 1, [(3, [0], [0.5])]),
        (1, 3, [(0, [0, 2], [0.25, 1.0]), (5, [2], [-0.5])]),
        (0, 64, [(2, list(range(8)), [0.1] * 8), (2, list(range(8, 11)), [0.3] * 3), (4, [63], [2.0])]),
        (1, 2, []),
        (1, 43, [(expert, list(range(i, min(i + 8, 43))), [1.0] * min(8, 43 - i)) for expert in (1, 3) for i in range(0, 43, 8)]),
        (0, 64, [(expert, list(range(i, i + 8)), [1.0] * 8) for expert in (0, 5) for i in range(0, 64, 8)]),
    ]
    for layer, rows, items in questions * 2:
        x = torch.randn(rows, HIDDEN, generator=source).bfloat16()
        found, expected = asked.ask(layer, x, items), reference(layers[layer], 2, x, items)
        assert (found - expected).norm() <= 3e-4 * expected.norm()
        assert torch.equal(found, asked.ask(layer, x, items)), "not the same twice"
    assert asked.share.counts.num_bytes > 0
    asked.share.close()


def tell(asked: Asked, number: int, layer: int, experts: list[int]) -> None:
    """As the device tells a guess: the list first, its number last."""
    asked.mailbox[GUESSES_AT : GUESSES_AT + 4 * len(experts)].view(torch.int32).copy_(torch.tensor(experts, dtype=torch.int32))
    asked.mailbox[TOLD_AT + 4 : TOLD_AT + 12].view(torch.int32).copy_(torch.tensor([layer, len(experts)], dtype=torch.int32))
    asked.mailbox[TOLD_AT : TOLD_AT + 4].view(torch.int32).fill_(number)


@pytest.mark.parametrize("threads", [1, 3])
def test_guesses_change_no_answer(lib: ctypes.CDLL, threads: int) -> None:
    """Right, wrong, more than there are, of no layer, in the middle of questions; and they are read: as many bytes as the guess has, or the cache."""
    del lib
    layers = [made(1), made(11)]
    asked = Asked(layers, 2, threads)
    source = torch.Generator().manual_seed(3)
    guesses = [
        (1, [0, 5]),
        (0, [1]),
        (1, []),
        (7, [2]),
        (0, [2**31 - 1, -1, 3]),
        (1, list(range(MAX_GUESSES))),
        (0, [2] * MAX_GUESSES),
    ]
    x = torch.randn(1, HIDDEN, generator=source).bfloat16()
    items = [(3, [0], [0.5]), (5, [0], [1.0])]
    plainly = asked.ask(1, x, items)
    for number, (layer, experts) in enumerate(guesses * 3, start=1):
        tell(asked, number, layer, experts)
        assert torch.equal(asked.ask(1, x, items), plainly)
    asked.share.close()


def test_what_was_guessed_is_read(lib: ctypes.CDLL) -> None:
    """By all threads together the CPU's part of each expert once, and no more than their caches hold."""
    del lib
    each = sum(part.data[0].numel() for part in made(1)) * 2 // 3  # two of three blocks
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    for experts, cached, expected in (([4, 1], 2**20, 2 * each), ([0, 2, 3], 4096, 2 * 4096), ([], 2**20, 0)):
        asked = Asked([made(1), made(11)], 2, 2, ahead_bytes=cached)
        tell(asked, 1, 1, experts)

        def is_read(asked: Asked = asked, expected: int = expected) -> bool:
            asked.ask(0, x, [(0, [0], [1.0])])  # of the layer before; it wakes threads that sleep
            return asked.share.counts.ahead_bytes == expected

        until(is_read, lambda asked=asked: asked.share.counts)
        asked.ask(1, x, [(0, [0], [1.0])])
        assert asked.share.counts.ahead_bytes == expected
        asked.share.close()
