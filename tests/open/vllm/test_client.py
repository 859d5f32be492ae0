"""vLLM behind our server, with a little program in its place."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.open import hardware as open_hardware
from windlass.open.vllm import start
from windlass.open.vllm.client import VllmClient
from windlass.tasks.launch.command import Command
from windlass.tasks.launch.vllm.process import free_port

pytestmark = [pytest.mark.cpu, pytest.mark.multi]
pytest.importorskip("httpx")

TINY = Path(__file__).parents[2] / "model" / "families" / "tiny"
PROGRAM = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {
            "/health": "",
            "/metrics": 'vllm:num_requests_running{engine="0"} 3.0\\nvllm:num_requests_waiting{engine="0"} 2.0\\n',
            "/v1/models": '{"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 64}]}',
        }[self.path].encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_its_numbers_reach_ours_and_every_start_has_a_port_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(TINY / "llama.json", tmp_path / "config.json")
    monkeypatch.setattr(open_hardware, "resolve_hardware", lambda _: parse_hardware("1xH100-80GB"))
    monkeypatch.setattr(start, "_device_bytes", lambda: 0)
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    plan = start.plan_vllm(tmp_path, context=64, concurrency=2)
    ports: list[int] = []

    def make_command() -> Command:
        ports.append(free_port())
        return Command(argv=(sys.executable, "-c", PROGRAM, "--host", "127.0.0.1", "--port", str(ports[-1])), env={})

    async def ask() -> None:
        client = VllmClient(make_command, "m", plan)
        try:
            info = await client.info()
            assert info.stats is not None and (info.stats.running, info.stats.waiting) == (3, 2)
            await client.restart()
            assert (await client.info()).model == "m"
        finally:
            await client.close()

    asyncio.run(ask())
    assert len(set(ports)) == len(ports) == 2
