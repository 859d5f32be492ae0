"""What the planner knows of the kernels without PyTorch is what they are."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from windlass.runtime.kernels.cuda import attention as heads
from windlass.runtime.kernels.cuda import layout
from windlass.runtime.nn.fused import decoder as fused
from windlass.runtime.nn.fused import feed_forward as fused_ffn
from windlass.runtime.nn.fused import layer as fused_layer
from windlass.tasks.plan.speed import kernels

pytestmark = pytest.mark.cpu


def test_the_planner_and_the_kernels_have_the_same_limits() -> None:
    assert kernels.STREAMED_ROWS == fused_layer.MAX_ROWS and kernels.DEPENDENT_ROWS == fused.DEPENDENT_ROWS
    assert kernels.FEW_ROWS == fused_ffn.FEW_ROWS == fused_ffn.ITEM_ROWS
    assert kernels.ITEM_ROWS == fused_ffn.WIDE_ITEMS and kernels.STREAMED_MEAN == fused_ffn.FEW_ROWS_OF_EACH
    assert kernels.INTEGER_MEAN == fused_ffn.FEW_ROWS_BEFORE_INT8 and kernels.FEW_ROWS == fused_layer.DENSE_ROWS
    assert kernels.MAX_SPLITS == heads.MAX_SPLITS


def test_rows_of_weights_are_as_long() -> None:
    for group in (32, 64, 128):
        assert kernels.PackedMatrix(16, 128, group).num_bytes == layout.block_bytes(group)
