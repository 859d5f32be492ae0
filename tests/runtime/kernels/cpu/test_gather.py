"""Rows looked up in C++: of activations, and of embedding tables in every type they are stored in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.runtime.kernels.cpu import embed as native_embed
from windlass.runtime.kernels.cpu import gather as native_gather
from windlass.runtime.kernels.program import program

pytestmark = pytest.mark.cpu
SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WIDTHS = st.sampled_from((1, 5, 16, 31, 64, 100, 576))

Run = Callable[..., tuple[Tensor, ...]]


@SETTINGS
@given(rows=st.integers(1, 9), picked=st.integers(0, 12), width=WIDTHS, seed=st.integers(0, 99))
def test_gathering(rows: int, picked: int, width: int, seed: int, run: Run) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width + 3, generator=draw)[:, :width]
    where = torch.randint(0, rows, (picked,), generator=draw).int()
    (mine,) = run(lambda: native_gather.gather(x, where), picked)
    assert torch.equal(mine, x[where.long()])


@SETTINGS
@given(
    rows=st.integers(1, 9),
    width=WIDTHS,
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    index=st.sampled_from((torch.int32, torch.int64)),
    learned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_embedding(rows: int, width: int, dtype: torch.dtype, index: torch.dtype, learned: bool, seed: int, run: Run) -> None:
    draw = torch.Generator().manual_seed(seed)
    table, positions_table = torch.randn(50, width, generator=draw).to(dtype), torch.randn(20, width, generator=draw).to(dtype)
    tokens = torch.randint(0, 50, (rows,), generator=draw).to(index)
    positions = torch.randint(0, 20, (rows,), generator=draw).to(index) if learned else None
    (mine,) = run(lambda: native_embed.embed(tokens, table, positions, positions_table if learned else None), rows)
    wanted = table[tokens].float()
    assert torch.equal(mine, wanted if positions is None else wanted + positions_table[positions].float())


@pytest.mark.usefixtures("instruction_set")
def test_every_half_precision_number_is_read_exactly() -> None:
    table = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(-1, 16)
    mine = native_embed.embed(torch.arange(table.shape[0]), table)
    assert mine is not None and torch.equal(mine.nan_to_num(7.0), table.float().nan_to_num(7.0))
    brain = table.view(torch.bfloat16)
    mine = native_embed.embed(torch.arange(brain.shape[0]), brain)
    assert mine is not None and torch.equal(mine.nan_to_num(7.0), brain.float().nan_to_num(7.0))


def test_replays_read_what_the_buffers_hold_then() -> None:
    table, tokens, counter = torch.randn(9, 4), torch.zeros(3, dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    with program.record(counter) as recorded:
        rows = native_embed.embed(tokens, table)
    assert rows is not None
    tokens.copy_(torch.tensor([8, 2, 5]))
    counter.fill_(3)
    recorded.run()
    assert torch.equal(rows, table[[8, 2, 5]])
