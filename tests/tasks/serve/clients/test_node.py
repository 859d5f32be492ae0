"""A streaming client in another language: OpenAI's own for JavaScript, under Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from fake import FakeClient
from serving import running

from waiting import HUNG_SECONDS

pytestmark = [pytest.mark.pure, pytest.mark.multi]
SCRIPT = Path(__file__).parents[1] / "stream.mjs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    made = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--ignore-scripts", "openai"]
    try:
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("npm install openai took too long; no registry can be reached")
    if done.returncode != 0:
        pytest.skip(f"npm install openai failed: {done.stderr.strip().splitlines()[-1:]}")
    shutil.copy(SCRIPT, made)
    return made


def test_whole_streamed_left_early_and_refused(folder: Path) -> None:
    with running(lambda: FakeClient(seconds=0.002), api_keys=("alpha",)) as server:
        command = ["node", str(folder / SCRIPT.name), f"{server.url}/v1"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HUNG_SECONDS)
        assert done.returncode == 0, done.stderr
        server.until(lambda: len(server.service.in_flight) == 0)
        assert server.service.metrics.outcomes["cancelled"] == 1
    found = json.loads(done.stdout)
    assert found["whole"] == "w0 w1 w2 " and found["streamed"] == "".join(f"w{number} " for number in range(8))
    assert found["usage"]["completion_tokens"] == 8 and found["pieces"] == 3
    assert found["refused"] == {"status": 400, "param": "temperature"}
