"""Other people's clients, unchanged, against SmolLM2: bench/serve/clients/run.py in an environment that has them.

`make harness` makes .venv-clients; WINDLASS_CLIENTS names another interpreter.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from serving import Running

pytestmark = [pytest.mark.cpu, pytest.mark.multi, pytest.mark.long]

ROOT = Path(__file__).parents[3]


def test_every_client_that_is_installed(smollm2_server: Running) -> None:
    beside = ROOT / ".venv-clients" / "bin" / "python"
    python = os.environ.get("WINDLASS_CLIENTS") or (str(beside) if beside.is_file() else "")
    if not python:
        pytest.skip("other clients are not installed: make harness")
    script = ROOT / "bench" / "serve" / "clients" / "run.py"
    done = subprocess.run([python, str(script), smollm2_server.url], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert "| openai |" in done.stdout
