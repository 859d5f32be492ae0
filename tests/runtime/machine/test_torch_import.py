"""Imports without garbage collections, and of libraries ahead of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from windlass.runtime.machine import torch_import

pytestmark = pytest.mark.pure

COUNTED = """
import gc
from windlass.runtime.machine.torch_import import importing

collections = []
gc.callbacks.append(lambda phase, about: collections.append(about["generation"]))
with importing():
    made = [[] for _ in range(100_000)]
    assert not collections and not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 100_000
gc.collect()
assert collections and not any(one is made for one in gc.get_objects())
gc.disable()
with importing():
    pass
assert not gc.isenabled()
"""


def test_nothing_is_collected_and_what_was_made_is_not_looked_at_again() -> None:
    """In a process of its own: what is frozen stays so."""
    subprocess.run([sys.executable, "-c", COUNTED], check=True)


FAILED = """
import gc
from windlass.runtime.machine.torch_import import importing

try:
    with importing():
        import no_such_module
except ModuleNotFoundError:
    assert gc.isenabled() and gc.get_freeze_count()
"""

THERE = """
import gc, sys
from windlass.runtime.machine.torch_import import importing

sys.modules["torch"] = gc
with importing():
    assert gc.isenabled()
assert not gc.get_freeze_count()
"""


@pytest.mark.parametrize("script", [FAILED, THERE], ids=["an import that fails", "torch is there already"])
def test_collections_go_on(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True)


AHEAD = """
import sys
from pathlib import Path
from windlass.runtime.machine import torch_import

def loaded():
    return {Path(line.split()[-1]).name for line in open("/proc/self/maps") if ".so" in line}

assert "libtorch_cpu.so" not in loaded()
told = []
for thread in torch_import.load_ahead(told.append):
    thread.join()
assert "PyTorch's libraries loaded" in told
assert "libtorch_cpu.so" in loaded() and "torch" not in sys.modules
import torch
assert torch.ones(3).sum() == 3
assert not torch_import.load_ahead()
"""


@pytest.mark.skipif(sys.platform != "linux" or importlib.util.find_spec("torch") is None, reason="libraries of PyTorch on Linux")
def test_libraries_are_loaded_before_torch_is_imported() -> None:
    subprocess.run([sys.executable, "-c", AHEAD], check=True)


BESIDE = """
import sys
from importlib import import_module
from windlass.runtime.machine import torch_import

torch_import.NVIDIA = torch_import.Path(sys.executable)
for module in torch_import.beside_libraries():
    try:
        import_module(module)
    except ImportError:
        pass
assert "torch" not in sys.modules
"""


def test_what_is_imported_meanwhile_does_not_wait_for_torch() -> None:
    subprocess.run([sys.executable, "-c", BESIDE], check=True)


def test_without_torch_there_is_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_import.libraries() == []
