"""Experts of a checkpoint go straight to their tiers, converted before or quantized while they load; what is found in the file is not read again."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from windlass.core.scheme import scheme  # noqa: E402
from windlass.core.tiers.device import DeviceSplit  # noqa: E402
from windlass.runtime.offload.device.share import library  # noqa: E402
from windlass.runtime.offload.device.weights import DeviceTieredWeights  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model  # noqa: E402
from windlass.runtime.weights.load.quantizing import quantized  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from disk_tiers import place_in  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(library() is None, reason="no compiler")]

SMALL: dict[str, dict[str, Any]] = {
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 128},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 256},
}
WIDE = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}
EXPERTS, ON_DEVICE, ON_DISK = 8, 2, 3


@pytest.fixture(scope="session")
def maker() -> Any:
    """tests/tasks/convert's maker of Hugging Face directories of every family."""
    file = Path(__file__).parents[3] / "tasks" / "convert" / "conftest.py"
    spec = importlib.util.spec_from_file_location("made_by_convert", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Tiny()


def converted(source: Path, folder: Path) -> Any:
    convert(source, folder / "out", ConvertSettings(scheme=scheme("int4"), jobs=1))
    return open_model(folder / "out")


def while_loading(source: Path, _: Path) -> Any:
    return quantized(open_model(source), "int4")


@pytest.mark.parametrize("opened", [converted, while_loading])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_tier_holds_what_the_checkpoint_says(maker: Any, name: str, opened: Callable[..., Any], tmp_path: Path) -> None:
    model = opened(maker.make(tmp_path / "model", name, **WIDE, **SMALL[name]), tmp_path)
    expected, folder = CheckpointWeights(model, tiled=True), tmp_path / "disk"
    folder.mkdir()
    routed = [at for at, layer in enumerate(model.spec.layers) if hasattr(layer.feed_forward, "num_experts")]
    has_shared = model.spec.experts.shared_intermediate_size > 0
    split = DeviceSplit(len(routed), EXPERTS, ON_DEVICE, has_shared, 1.0, ON_DISK, cache_slots=4)
    told = list[list[int]]()
    for is_found in (False, True):
        told.append([])
        behind = CheckpointWeights(model, tiled=True, progress=lambda done, _: told[-1].append(done))
        weights = DeviceTieredWeights(behind, split, routed[0], place_in(folder))
        layers = [weights.experts(layer, "gate", "up") for layer in routed]
        assert weights.was_found == is_found
        tier: Any = weights.finish()
        for number, (layer, found) in enumerate(zip(routed, layers, strict=True)):
            gate_up, down = expected.experts(layer, "gate", "up"), expected.experts(layer, "down")
            found.copies.before(number)  # from host memory and from the file
            for expert, at in enumerate(found.whole_table.tolist()[:-1]):
                assert torch.equal(found.slots.gate_up.data[at], gate_up.data[expert]), (layer, expert)
                assert torch.equal(found.slots.down.data[at], down.data[expert]), (layer, expert)
            found.copies.after(number)
        assert tier.stats().disk_bytes == len(routed) * ON_DISK * tier._memory.disk.block_bytes
        tier.close()
    assert told[0][-1] == told[1][-1], "progress ends where it did"
    model.store.close()
