"""The model inside the package: what it is, that it is small, and that what is said of it is there."""

from __future__ import annotations

import gzip

import msgspec
import pytest

from windlass.core.count import count_parameters
from windlass.core.model import MoE
from windlass.core.recipe.recipe import load_recipe
from windlass.model.bundled.models import bundled_names, find_bundled
from windlass.open.resolve import describe_model, model_files

pytestmark = pytest.mark.pure


def test_it_is_found_by_its_name() -> None:
    assert bundled_names() == ["tiny-glm"]
    folder = find_bundled("tiny-glm")
    assert folder is not None
    assert find_bundled("tiny") is None
    assert find_bundled("../bundled/tiny-glm") is None


def test_it_is_a_small_mixture_of_experts() -> None:
    folder = find_bundled("tiny-glm")
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < 25e6
    found = describe_model("tiny-glm")
    moe = found.spec.layers[-1].feed_forward
    assert isinstance(moe, MoE)
    assert (moe.num_experts, moe.num_active) == (16, 4)
    assert moe.shared_intermediate_size > 0
    assert count_parameters(found.spec, found.rules).total < 20e6
    assert found.spec.vocab_size <= 8192


def test_recipe_log_and_plot_lie_beside_it() -> None:
    folder = model_files("tiny-glm", shown=False)
    recipe = load_recipe(folder / "recipe.toml")
    lines = gzip.decompress((folder / "training.jsonl.gz").read_bytes()).splitlines()
    steps = [step for step in map(msgspec.json.decode, lines) if "grad_norm" in step]
    assert len(steps) == recipe.schedule.steps
    assert steps[0]["loss"] > 8 > 0.1 > steps[-1]["loss"]
    assert (folder / "training.png").read_bytes()[:4] == b"\x89PNG"
    by_task = msgspec.json.decode((folder / "accuracy.json").read_bytes())["accuracy"]
    assert len(by_task) == 13
    assert all(right >= 0.9 * total for right, total in by_task.values())
