"""A served router while its models are killed, slowed and rate limited: 1,000 requests by OpenAI's Python client.

Two scripted models behind `windlass.tasks.serve` in processes of their own, `windlass serve --route` before them. `small` is right at sums,
`large` at sums and names; whether an answer is right is in its text. `python bench/route/served.py [NUM_REQUESTS]`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

NUM_REQUESTS = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 1000
AT_ONCE = 12
COSTS = {"small": 1.0, "large": 10.0}


# --- the models


def model_main(name: str, port: int, control: str) -> None:
    """`control`: a file that says `slow`, `busy` or nothing."""
    from windlass.core.client import Busy
    from windlass.core.request import Delta, Info, Request, Usage
    from windlass.tasks.route.features.text import text_of
    from windlass.tasks.serve.app import make_app
    from windlass.tasks.serve.server import bind, serve
    from windlass.tasks.serve.settings import ServerSettings

    class Scripted:
        async def generate(self, request: Request):  # type: ignore[no-untyped-def]
            mode = Path(control).read_text().strip()
            if mode == "busy":
                raise Busy("rate limited")
            if mode == "slow":
                await asyncio.sleep(20.0)
            words = said(name, text_of(request)).split(" ")
            for place, word in enumerate(words):
                await asyncio.sleep(0.002)
                yield Delta(content=f"{word} ", token_ids=(place,))
            yield Delta(finish_reason="stop", usage=Usage(prompt_tokens=12, completion_tokens=len(words)))

        async def score(self, request: Any) -> Any:
            raise NotImplementedError

        async def info(self) -> Info:
            return Info(model=name, context_tokens=4096, max_sequences=64)

        async def close(self) -> None: ...

    settings = ServerSettings(port=port, max_waiting=1000, log_requests=False)
    listening = bind(settings)
    serve(make_app(Scripted(), settings, page=False), settings, listening)  # type: ignore[arg-type]


def said(name: str, prompt: str) -> str:
    is_right = name == "large" or prompt.startswith("What is")
    return f"{name} answers {'right' if is_right else 'wrong'} and says a few words more"


# --- the run


def prompt_of(kind: str, number: int, draw: random.Random) -> str:
    if kind == "sum":
        return f"What is {draw.randint(1, 99)} + {draw.randint(1, 99)} for case {number}?"
    return f"Name the {draw.choice(WORDS)} {draw.choice(WORDS)} thing number {number} that people call {draw.choice(WORDS)}."


WORDS = "red blue green small large old new round flat cold warm quick slow".split()


def write_router(folder: Path, ports: dict[str, int]) -> None:
    draw = random.Random(1)
    with (folder / "answers.jsonl").open("w") as stream:
        for number in range(400):
            kind = draw.choice(("sum", "name"))
            prompt = prompt_of(kind, number, draw)
            for name, cost in COSTS.items():
                line = {"prompt": prompt, "model": name, "score": "right" in said(name, prompt), "group": kind, "cost": cost}
                stream.write(json.dumps(line) + "\n")
    subprocess.run(
        [sys.executable, "-m", "windlass", "route", "fit", "answers.jsonl", "--json"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    models = "".join(f'[[models]]\nname = "{name}"\nat = "http://127.0.0.1:{port}"\n' for name, port in ports.items())
    (folder / "router.toml").write_text(
        f'router = "router.json"\nlog = "log.jsonl"\nfirst_token_seconds = 1.0\n[breaker]\nopen_seconds = 1.0\nmax_open_seconds = 4.0\n{models}'
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(name: str, port: int, control: Path) -> subprocess.Popen[bytes]:
    log = control.with_suffix(".log").open("ab")
    process = subprocess.Popen([sys.executable, __file__, "--model", name, str(port), str(control)], stdout=log, stderr=log)
    wait(port)
    return process


def wait(port: int, path: str = "/health") -> None:
    import httpx

    for _ in range(600):
        try:
            if httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}")


async def run(folder: Path) -> None:
    ports = {name: free_port() for name in COSTS}
    control = {name: folder / f"{name}.control" for name in COSTS}
    for path in control.values():
        path.write_text("")
    models = {name: start(name, port, control[name]) for name, port in ports.items()}
    write_router(folder, ports)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "windlass",
        "serve",
        "--route",
        "router.toml",
        "--port",
        str(port),
        "-q",
        "--max-waiting",
        "1000",
    ]
    server = subprocess.Popen(command, cwd=folder, stderr=(folder / "serve.log").open("wb"))
    try:
        wait(port)
        await requests(port, models, ports, control)
        import httpx

        lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        print("\n".join(line for line in lines if line.startswith("windlass_route")))
    finally:
        for process in (server, *models.values()):
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    subprocess.run([sys.executable, "-m", "windlass", "route", "replay", "log.jsonl"], cwd=folder, check=True)


async def requests(port: int, models: dict[str, Any], ports: dict[str, int], control: dict[str, Path]) -> None:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
    draw, turn, phase = random.Random(2), asyncio.Semaphore(AT_ONCE), ["calm"]
    results: list[tuple[str, str, str, str, float]] = []
    lost: list[str] = []

    async def one(number: int) -> None:
        kind = "sum" if number % 2 else "name"
        prompt = prompt_of(kind, number, draw)
        async with turn:
            began, during = time.monotonic(), phase[0]
            try:
                response = await client.chat.completions.with_raw_response.create(
                    model="auto", messages=[{"role": "user", "content": prompt}], stream=True, temperature=0
                )
                text = ""
                async for chunk in response.parse():
                    if chunk.choices and chunk.choices[0].delta.content:
                        text += chunk.choices[0].delta.content
                model = response.headers.get("windlass-route-model", "late")
                assert "more" in text, text
                results.append((during, kind, model, "right" if "right" in text else "wrong", time.monotonic() - began))
            except Exception as error:  # noqa: BLE001 - every failure is counted
                lost.append(f"{during}: {type(error).__name__}: {error}"[:150])

    step = NUM_REQUESTS // 10
    events = {
        1: ("small killed", lambda: models["small"].kill()),
        3: ("small back", lambda: models.__setitem__("small", start("small", ports["small"], control["small"]))),
        4: ("large slow", lambda: control["large"].write_text("slow")),
        6: ("large rate limited", lambda: control["large"].write_text("busy")),
        8: ("calm again", lambda: control["large"].write_text("")),
    }
    begun = time.monotonic()
    for tenth in range(10):
        if tenth in events:
            phase[0], act = events[tenth]
            await asyncio.to_thread(act)
        await asyncio.gather(*(one(tenth * step + place) for place in range(step)))
    print(f"{len(results)} of {step * 10} answered, {len(lost)} lost, in {time.monotonic() - begun:.0f} s")
    for line in lost[:5]:
        print("  lost", line)
    print(f"{'phase':20} {'right':>6} {'cost':>6}  p50 s  p95 s  answered by")
    for name in dict.fromkeys(result[0] for result in results):
        some = [result for result in results if result[0] == name]
        right = sum(result[3] == "right" for result in some) / len(some)
        cost = sum(COSTS.get(result[2], 10.0) for result in some) / len(some)
        times = sorted(result[4] for result in some)
        by = ", ".join(f"{model} {count}" for model, count in Counter(result[2] for result in some).most_common())
        print(f"{name:20} {right:6.1%} {cost:6.2f} {times[len(times) // 2]:6.2f} {times[int(0.95 * len(times))]:6.2f}  {by}")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--model":
        model_main(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        with tempfile.TemporaryDirectory() as made:
            asyncio.run(run(Path(made)))
