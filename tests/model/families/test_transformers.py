"""Names and shapes of every tensor equal those of the transformers implementation, in memory and in the files it writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from windlass.core.rule import stored_tensors
from windlass.model.families import describe, hints_from, rules
from windlass.model.formats.checkpoint import tensor_names
from windlass.model.formats.config import read_config

torch: Any
transformers: Any
safetensors: Any

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore"),  # theirs; ours have their own tests
]

NOT_IN_TRANSFORMERS = {"chatglm", "evo2"}
TINY = {
    path.stem: path for path in sorted((Path(__file__).parent / "tiny").glob("*.json")) if path.stem not in NOT_IN_TRANSFORMERS
}
# In these the file differs from what is published; the test says how.
PUBLISHED_OTHERWISE = {"bloom", "gpt_oss"}
PUBLISHED, IN_MEMORY = 0, -1
Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module", autouse=True)
def _theirs() -> None:
    """Imported when the first of these tests runs, not when tests are collected: seconds, for whoever wants none of them."""
    global torch, transformers, safetensors
    torch, transformers, safetensors = map(pytest.importorskip, ("torch", "transformers", "safetensors"))


def config_of(name: str) -> Any:
    values = json.loads(TINY[name].read_text())
    model_type = values.pop("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return transformers.CONFIG_MAPPING[model_type](**values)


def shapes_in_memory(name: str) -> Shapes:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def shapes_in_files(folder: Path) -> Shapes:
    found: Shapes = {}
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            found |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    return found


def ours(values: Mapping[str, Any], theirs: Shapes, choice: int) -> Shapes:
    """`theirs` only decides whether a tied head is stored as well, as it does when a checkpoint is read."""
    num_layers = describe(values).num_layers
    made = rules(describe(values, hints=hints_from(theirs, num_layers)))
    last = max(len(rule.sources) for rule in made)
    return {tensor.name: tensor.shape for tensor in stored_tensors(made, last if choice == IN_MEMORY else choice)}


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", TINY)
def test_todays_dialect_is_read(name: str) -> None:
    """What transformers writes today describes the same model as the short config it was made from."""
    written = describe(config_of(name).to_dict())
    short = describe(json.loads(TINY[name].read_text()))
    assert written.layers == short.layers
    assert written.positions == short.positions
    assert (written.hidden_size, written.vocab_size, written.tied_head) == (short.hidden_size, short.vocab_size, short.tied_head)
    assert (written.norm.kind, written.embedding_norm) == (short.norm.kind, short.embedding_norm)


@pytest.mark.parametrize("name", TINY)
def test_tensors_in_memory(name: str) -> None:
    theirs = shapes_in_memory(name)
    assert ours(config_of(name).to_dict(), theirs, IN_MEMORY) == theirs


@pytest.mark.parametrize("name", sorted(TINY.keys() - PUBLISHED_OTHERWISE))
def test_tensors_in_files(name: str, tmp_path: Path) -> None:
    """A mixture is saved expert by expert, as it is published."""
    folder = saved(name, tmp_path)
    theirs = shapes_in_files(folder)
    assert tensor_names(folder) == theirs.keys()
    assert ours(read_config(folder), theirs, PUBLISHED) == theirs


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_are_saved_one_by_one(name: str, tmp_path: Path) -> None:
    """The other test would pass as well if neither side did."""
    names = tensor_names(saved(name, tmp_path))
    assert any(".experts.0." in key for key in names)
    assert not any(key.endswith("experts.gate_up_proj") for key in names)


def test_bloom_is_saved_with_a_prefix_that_published_files_lack(tmp_path: Path) -> None:
    folder = saved("bloom", tmp_path)
    theirs = shapes_in_files(folder)
    assert ours(read_config(folder), theirs, IN_MEMORY) == theirs
    bare = {name.removeprefix("transformer."): shape for name, shape in theirs.items()}
    assert ours(read_config(folder), theirs, PUBLISHED) == bare


def test_gpt_oss_is_published_in_blocks_and_saved_plainly(tmp_path: Path) -> None:
    """transformers saves bf16 experts stacked and transposed; the published files hold MXFP4 blocks of 32 inputs."""
    folder = saved("gpt_oss", tmp_path)
    theirs = shapes_in_files(folder)
    assert ours(read_config(folder), theirs, IN_MEMORY) == theirs
    published = ours(read_config(folder), theirs, PUBLISHED)
    stem = "model.layers.1.mlp.experts"
    assert published[f"{stem}.gate_up_proj_blocks"] == (3, 2 * 32, 64 // 32, 16)
    assert published[f"{stem}.gate_up_proj_scales"] == (3, 2 * 32, 64 // 32)
    assert published[f"{stem}.down_proj_blocks"] == (3, 64, 32 // 32, 16)
    assert published[f"{stem}.gate_up_proj_bias"] == theirs[f"{stem}.gate_up_proj_bias"] == (3, 64)
