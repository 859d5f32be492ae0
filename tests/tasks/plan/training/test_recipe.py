from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.recipe.recipe import Recipe, load_recipe, recipe_from
from windlass.errors import BadInput, UnknownName

pytestmark = pytest.mark.pure

WHOLE = """
[model]
name = "GLM-4.6"
mtp = true
[hardware]
on = "128x(8xH800)@400Gb"
[data]
tokens = "23T"
sequence_length = "4k"
[batch]
global_batch = 8192
[parallel]
tp = 2
pp = 16
ep = 8
[memory]
recompute = "none"
[optimizer]
name = "muon"
"""


def test_a_whole_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(WHOLE)
    recipe = load_recipe(path)
    assert recipe.data.tokens == 23 * 10**12
    assert recipe.data.sequence_length == 4096
    assert recipe.parallel.tp == 2
    assert recipe.parallel.cp is None
    assert recipe.memory.flash_attention


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"modle": {}}, "did you mean model"),
        ({"model": {"name": "x"}, "parallel": {"tpp": 2}}, "did you mean parallel.tp"),
        ({"model": {"name": "x"}, "memory": {"recomput": "full"}}, "memory.recompute"),
        ({"model": {"name": "x"}, "parallel": {"tp": "two"}}, "parallel.tp: expected"),
        ({"model": {"name": "x"}, "memory": {"recompute": "some"}}, "memory.recompute: invalid"),
        ({"model": {"name": "x"}, "parallel": {"tp": 0}}, "tp is 0"),
        ({"model": {"name": "x"}, "parallel": {"zero": 4}}, "stages 0, 1, 2 and 3"),
        ({"model": {}}, "exactly one of name, path and config"),
        ({"model": {"name": "x", "path": "y"}}, "name and path"),
        ({"model": {"name": "x"}, "batch": {"tokens": "4M", "global_batch": 3}}, "not both"),
        ({"model": {"name": "x"}, "data": {"tokens": "many"}}, "is not a count"),
        ({"model": {"name": "x"}, "checkpoint": {"interval_minutes": -3}}, "checkpoint.interval_minutes is -3"),
        ({"model": {"name": "x"}, "checkpoint": {"interval_minutes": float("nan")}}, "checkpoint.interval_minutes is nan"),
        ({"model": {"name": "x"}, "checkpoint": {"restart_minutes": -600}}, "checkpoint.restart_minutes is -600"),
        ({"model": {"name": "x"}, "checkpoint": {"restart_minutes": float("inf")}}, "finite"),
        ({"model": {"name": "x"}, "checkpoint": {"bandwidth": 0}}, "checkpoint.bandwidth is 0"),
        ({"model": {"name": "x"}, "checkpoint": {"bandwidth": "fast"}}, "is not a size"),
        ({"model": {"name": "x"}, "data": {"tokens": 0}}, "data.tokens is 0"),
        ({"model": {"name": "x"}, "batch": {"global_batch": 10**30}}, "batch.global_batch"),
        ({"model": {"name": "x"}, "data": {"tokens": "9e20T"}}, "data.tokens is more than 10^18"),
        ({"model": 3}, "model"),
        ({}, "model"),
    ],
)
def test_bad_recipes_give_one_line(table: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        recipe_from(table)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_stores_bandwidth() -> None:
    for text in ("200GB", "200GB/s", 200e9):
        recipe = recipe_from({"model": {"name": "x"}, "checkpoint": {"bandwidth": text}})
        assert recipe.checkpoint.bandwidth == 200e9


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(BadInput, match="not TOML"):
        load_recipe(tmp_path / "bad.toml")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["tp", "tokens", "name", "recompute", "interval_minutes", "bandwidth", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*Recipe.__struct_fields__, "y"]), VALUES, max_size=4))
def test_any_table_is_read_or_refused(table: dict[str, Any]) -> None:
    try:
        recipe_from(table)
    except (BadInput, UnknownName) as error:
        assert "\n" not in str(error).replace("\\n", "")


TRAINED = """
[model]
name = "GLM-4.6"
start = "weights"
[[data.sources]]
path = "text"
weight = 2
[[data.sources]]
path = "code"
weight = 1.0
[optimizer]
lr = 1e-4
betas = [0.9, 0.98]
weight_decay = 0.0
[schedule]
name = "wsd"
steps = 100
warmup_steps = 10
decay_steps = 20
[loss]
balance = 0
bias_rate = 0.0
[parallel]
fsdp = 4
[checkpoint]
interval_steps = 50
milestone_steps = 1000
[lora]
rank = 16
targets = ["attention", "experts"]
[run]
seed = 7
compile = true
"""


def test_a_recipe_to_train_by(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(TRAINED)
    recipe = load_recipe(path, ["optimizer.lr=2e-4", "run.folder=runs/one", "batch.global_batch=8"])
    assert [source.weight for source in recipe.data.sources] == [2, 1]
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.optimizer.weight_decay) == (2e-4, (0.9, 0.98), 0)
    assert (recipe.run.folder, recipe.batch.global_batch) == ("runs/one", 8)
    assert recipe.parallel.zero == 3  # what planning calls FSDP
    assert recipe.lora.targets == ("attention", "experts")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"data": {"sources": [{"path": "x", "wieght": 1}]}}, r"did you mean data.sources\[0\].weight"),
        ({"optimizer": {"lr": 0.0}}, "optimizer.lr is 0; it must be a finite number above 0"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "betas has 1"),
        ({"schedule": {"steps": 10, "warmup_steps": 8, "decay_steps": 3}}, "shorter than warmup plus decay \\(11\\)"),
        ({"schedule": {"name": "cosine", "decay_steps": 3}}, 'schedule.decay_steps needs schedule.name = "wsd"'),
        ({"lora": {"targets": ["experts"]}}, "has no rank, so all weights would be trained"),
        ({"run": {"deepspeed": "ds.json"}}, "run.deepspeed needs run.engine"),
        ({"schedule": {"final": 2.0}}, "at most 1"),
        ({"schedule": {"name": "cosinus"}}, "schedule.name: invalid"),
        ({"loss": {"z": -0.1}}, "of at least 0"),
        ({"parallel": {"fsdp": 2, "zero": 1}}, "ZeRO stage 3, but parallel.zero is 1"),
        ({"lora": {"rank": 0}}, "lora.rank is 0"),
        ({"run": {"engine": "torchrun"}}, "run.engine: invalid"),
    ],
)
def test_what_a_trainer_cannot_use_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises((BadInput, UnknownName), match=words):
        recipe_from({"model": {"name": "x"}, **table})


@pytest.mark.parametrize("setting", ["optimizer.lr", "lr=3", "model=x", "=3"])
def test_a_setting_that_names_no_key_is_refused(tmp_path: Path, setting: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(TRAINED)
    with pytest.raises(BadInput, match=r"section\.key=value"):
        load_recipe(path, [setting])
