"""Checks and formats are found once for experts that are alike; one that is not is refused, or counted as what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from windlass.core.scheme import scheme  # noqa: E402
from windlass.errors import BadCheckpoint  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model  # noqa: E402
from windlass.runtime.weights.tensors import storage_format as forms  # noqa: E402
from windlass.runtime.weights.tensors import validate  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

pytestmark = pytest.mark.cpu

SHAPE = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}
LAST = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("alike")
    source = tiny.make(at / "model", "qwen3_moe", **SHAPE, moe_intermediate_size=256, num_experts=4)
    convert(source, at / "out", ConvertSettings(scheme=scheme("int4", 64), jobs=1))
    return at / "out"


@pytest.fixture
def changed(whole: Path, tmp_path: Path) -> Callable[..., Path]:
    def change(**parts: Any) -> Path:
        """Parts of the last expert's up replaced, or left out."""
        tensors = load_file(whole / "model.safetensors") | {f"{LAST}_{part}": made for part, made in parts.items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
        return tmp_path

    return change


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"scale": None}, "weight_scale is missing"),
        ({"scale": torch.zeros(256, 2)[:128]}, r"weight_scale: is F32 \[128, 2\]"),
        ({"scale": torch.zeros(256, 3)}, "neither 4 nor 8 bits"),
        ({"scale": torch.zeros(256, 4, dtype=torch.int32)}, "weight_scale: is I32"),
        ({"packed": torch.zeros(256, 32)}, "weight_packed: is F32"),
        ({"packed": torch.zeros(255, 32, dtype=torch.int32)}, r"weight_packed: is I32 \[255, 32\]"),
        ({"packed": torch.zeros(256, 31, dtype=torch.int32)}, "neither 4 nor 8 bits"),
        ({"g_idx": torch.zeros(256, dtype=torch.int32)}, "activation ordering"),
        ({"zero_point": torch.zeros(7, 4, dtype=torch.int32)}, "weight_zero_point: is I32"),
        ({"packed": None, "scale": None, "shape": None}, "missing from the checkpoint"),
    ],
)
def test_one_expert_that_is_wrong(changed: Callable[..., Path], parts: dict[str, Any], says: str) -> None:
    with pytest.raises(BadCheckpoint, match=says) as caught:
        open_model(changed(**parts))
    assert (caught.value.tensor or "").startswith(LAST)


def test_one_expert_in_another_format(changed: Callable[..., Path]) -> None:
    opened = open_model(changed(scale=torch.ones(256, 4, dtype=torch.float32)))
    weights = CheckpointWeights(opened, tiled=True)
    assert not weights.tiled
    held = list(weights._index.held(opened.spec, (0, opened.spec.num_layers), (0, 4)))
    shards = [weights._find(tensor) for tensor in held]
    one_by_one = [forms.storage_format(opened.store, shard.tensor, shard.location) for shard in shards]
    assert [weights._form(shard) for shard in shards] == one_by_one
    stored = [int(shard.num_rows * shard.num_in * form.bits / 8) for shard, form in zip(shards, one_by_one, strict=True)]
    assert weights.total_bytes() == sum(stored) == sum(weights.storage().values())
    told = list(weights.held_tensors())
    assert [one.name for one in told] == [tensor.name for tensor in held]
    assert [one.num_bytes for one in told] == [weights._memory_bytes(shard) for shard in shards]
    assert weights.memory_bytes() == sum(one.num_bytes for one in told)
    sizes = {one.name: one.num_bytes for one in told}
    first, last = (sizes[f"layers.1.ffn.experts.{expert}.up.weight"] for expert in (0, 3))
    assert last - first == 256 * 4 * 2  # scales of four bytes instead of two


def test_a_rule_is_checked_once(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, real = list[str](), validate.check_stored
    monkeypatch.setattr(validate, "check_stored", lambda ours, *rest: checked.append(ours.rule.ours) or real(ours, *rest))
    opened = open_model(whole)
    assert len(checked) == len(opened.rules)  # experts and layers of one kind are one
    found, plain = list[str](), forms.storage_format
    monkeypatch.setattr(forms, "storage_format", lambda store, *rest: found.append(rest[1].name) or plain(store, *rest))
    weights = CheckpointWeights(opened, tiled=True)
    weights.total_bytes(), weights.memory_bytes(), list(weights.held_tensors()), weights.storage()
    assert len(found) == len(opened.rules)
