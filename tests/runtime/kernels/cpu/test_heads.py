"""A matrix per head in C++ equals PyTorch's product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.runtime.kernels.cpu import heads as native_heads
from windlass.runtime.kernels.ops.heads import reference

pytestmark = pytest.mark.cpu
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Run = Callable[..., tuple[Tensor, ...]]


@SETTINGS
@given(
    rows=st.one_of(st.integers(1, 14), st.sampled_from((48, 49, 60))),
    heads=st.sampled_from((1, 2, 5)),
    depth=st.sampled_from((1, 16, 31, 32, 33, 80)),
    width=st.sampled_from((1, 15, 16, 40, 64, 130)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 99),
)
@example(rows=1, heads=4, depth=192, width=512, dtype=torch.bfloat16, seed=0)
def test_products(rows: int, heads: int, depth: int, width: int, dtype: torch.dtype, seed: int, run: Run) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, depth + 5, generator=draw)[..., :depth]
    weight = torch.randn(heads, depth, width, generator=draw).to(dtype)
    (mine,) = run(lambda: native_heads.heads_matmul(x, weight), rows)
    torch.testing.assert_close(mine, reference(x, weight), atol=2e-5, rtol=2e-5)


def test_a_row_alone_gives_what_it_gives_among_others(run: Run) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 3, 40, generator=draw), torch.randn(3, 40, 70, generator=draw)
    (together,) = run(lambda: native_heads.heads_matmul(x, weight), 50)
    for row in (0, 13, 49):
        alone = native_heads.heads_matmul(x[row : row + 1], weight)
        assert alone is not None and torch.equal(alone[0], together[row])
