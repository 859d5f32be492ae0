"""What a rank may use of a machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from windlass.core.launch import Launch
from windlass.engine.tiers import build_decoder
from windlass.errors import BadInput
from windlass.offload.placement import host_budget

pytestmark = pytest.mark.cpu


def budget(host_memory: int | None, free_bytes: int) -> Any:
    system: Any = SimpleNamespace(ram_bytes=free_bytes)
    return host_budget(Launch(host_memory=host_memory), 0, system)


def test_a_cap_above_what_is_free_is_what_is_free() -> None:
    free = budget(None, 2**30)
    assert free.cap_bytes == 2**30 + free.used_bytes
    assert abs(budget(2**40, 2**30).cap_bytes - free.cap_bytes) < 2**28, "the process itself may have grown"
    assert budget(2**29, 2**30).cap_bytes == 2**29


def test_a_folder_that_a_gpu_does_not_use_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(BadInput, match="not on disk"):
        build_decoder(Launch(disk_folder="/tmp"), "cuda", nothing, 0, None)
