"""A matrix per head, and rows picked."""

from __future__ import annotations

import pytest
import torch

from windlass.runtime.kernels.ops.gather import gather
from windlass.runtime.kernels.ops.heads import heads_matmul, reference

pytestmark = pytest.mark.cpu


def test_head_by_head() -> None:
    x, weight = torch.randn(5, 3, 4), torch.randn(3, 4, 6)
    found = reference(x, weight)
    assert found.is_contiguous()
    for head in range(3):
        torch.testing.assert_close(found[:, head], x[:, head] @ weight[head])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_of_wider_heads(dtype: torch.dtype) -> None:
    """Whoever computes: the queries of latent attention are cut out of heads that also carry their position."""
    x, weight = torch.randn(5, 3, 7), torch.randn(3, 4, 6).to(dtype)
    torch.testing.assert_close(heads_matmul(x[..., :4], weight), reference(x[..., :4].contiguous(), weight))


def test_a_matrix_seen_from_its_other_side() -> None:
    x, weight = torch.randn(5, 3, 4), torch.randn(3, 6, 4)
    torch.testing.assert_close(heads_matmul(x, weight.transpose(1, 2)), reference(x, weight.transpose(1, 2).contiguous()))


def test_rows() -> None:
    x = torch.randn(6, 5)
    assert torch.equal(gather(x, torch.tensor([4, 0, 4], dtype=torch.int32)), x[[4, 0, 4]])
    assert gather(x, torch.zeros(0, dtype=torch.int32)).shape == (0, 5)
