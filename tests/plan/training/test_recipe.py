from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.recipe import Recipe, load_recipe, recipe_from
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
