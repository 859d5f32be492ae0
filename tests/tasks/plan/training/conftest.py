"""The published runs, and the script that makes jobs of them (bench/plan/published_training.py is no package)."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.model.families import describe, rules

ROOT = Path(__file__).parents[4]
if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))  # for stage_memory


@pytest.fixture(scope="session")
def published() -> ModuleType:
    where = ROOT / "bench" / "plan" / "published_training.py"
    found = importlib.util.spec_from_file_location("bench_published", where)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["bench_published"] = module
    found.loader.exec_module(module)
    return module


Model = Callable[[str], tuple[ModelSpec, tuple[Rule, ...]]]


@pytest.fixture(scope="session")
def model() -> Model:
    """A registry config by its file name."""

    def read(name: str) -> tuple[ModelSpec, tuple[Rule, ...]]:
        config = json.loads((ROOT / "src" / "windlass" / "model" / "families" / "configs" / f"{name}.json").read_text())
        spec = describe(config, name)
        return spec, rules(spec)

    return read


@pytest.fixture(scope="session")
def gpt(published: ModuleType) -> Callable[[int, int, int], tuple[ModelSpec, tuple[Rule, ...]]]:
    """The Megatron papers' GPT: hidden, layers, heads."""

    def build(hidden: int, layers: int, heads: int) -> tuple[ModelSpec, tuple[Rule, ...]]:
        spec = describe(published.gpt_config(hidden, layers, heads), "gpt")
        return spec, rules(spec)

    return build
