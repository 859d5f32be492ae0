"""Other people's clients, unchanged, against SmolLM2: bench/serve/clients/run.py in an environment that has them.

`make harness` makes .venv-clients; WINDLASS_CLIENTS names another interpreter.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from serving import Running, running

pytestmark = [pytest.mark.cpu, pytest.mark.multi, pytest.mark.long]

ROOT = Path(__file__).parents[4]


def interpreter() -> str:
    beside = ROOT / ".venv-clients" / "bin" / "python"
    python = os.environ.get("WINDLASS_CLIENTS") or (str(beside) if beside.is_file() else "")
    if not python:
        pytest.skip("other clients are not installed: make harness")
    return python


def ran(script: str, url: str) -> str:
    path = ROOT / "bench" / "serve" / "clients" / script
    done = subprocess.run([interpreter(), str(path), url], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_client_that_is_installed(smollm2_server: Running) -> None:
    assert "| openai |" in ran("run.py", smollm2_server.url)


def test_the_open_responses_specification() -> None:
    from windlass.core.launch import Launch
    from windlass.model.bundled.models import find_bundled
    from windlass.runtime.engine.client.client import open_client

    launch = Launch(model=str(find_bundled("tiny-glm")), device="cpu")
    with running(lambda: open_client(launch), model="tiny-glm", stuck_seconds=60.0) as server:
        assert "6 of 6 passed" in ran("open_responses.py", server.url)
