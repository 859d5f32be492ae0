"""Tiny checkpoints in every format, made by the neighbouring tests' own writers."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
if str(HERE / "load") not in sys.path:
    sys.path.insert(0, str(HERE / "load"))


def load(file: Path) -> ModuleType:
    """Test files are no package: one that makes files for others is loaded by its path."""
    spec = importlib.util.spec_from_file_location(f"made_by_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="module")
def no_disk_is_waited_for() -> Iterator[None]:
    """What was written is there without: only a power cut could tell. It is most of the time that small conversions take."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda _: None)
        yield


@pytest.fixture(scope="session")
def tiny() -> Any:
    """tests/tasks/convert's maker of Hugging Face directories of every family."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    return load(HERE.parents[1] / "tasks" / "convert" / "conftest.py").Tiny()


@pytest.fixture(scope="session")
def gguf_maker() -> ModuleType:
    pytest.importorskip("gguf")
    return load(HERE / "stores" / "test_gguf.py")


@pytest.fixture(scope="session")
def dllama_maker() -> ModuleType:
    return load(HERE / "stores" / "test_dllama.py")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small, and tests run side by side: a second thread would only wait for a core."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
