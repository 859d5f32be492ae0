"""Crash test of conversion: kill it, resume it, compare the output. Run: python bench/convert/kills.py [--kills 200] [--points STEP]

Every conversion is a process forked from this one, so that kills hit the work and not the imports. With `--kills` it gets SIGKILL
at random moments, is restarted, and finally left to finish. With `--points` it exits at every write, sync, rename and unlink in
turn, with the last write only half done. The resumed output must be byte-identical to that of an undisturbed conversion, with no
other files left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from windlass.core.scheme import scheme
from windlass.tasks.convert.convert import JOURNAL, REPORT, ConvertSettings, convert

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
SETTINGS = ConvertSettings(scheme=scheme("int4"), max_memory_bytes=40 * 2**20, jobs=2, max_shard_bytes=800_000)
MOST_KILLS = 5
"""Per conversion; then it may finish."""
LAST_POINTS = 10
"""Always tried: config.json is renamed and the journal removed there."""
CHAIN_STEP = 3
NOT_REPRODUCIBLE = ("seconds", "peak_memory_bytes")


def make_source(directory: Path) -> Path:
    """A checkpoint of a few megabytes in two files, with tokenizer files."""
    hidden, ffn, vocabulary = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": (hidden // 2, hidden) for name in "kv"}
        shapes |= {f"model.layers.{layer}.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (hidden, ffn)
        shapes |= {f"model.layers.{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    draw = torch.Generator().manual_seed(0)
    tensors = {name: (torch.randn(shape, generator=draw) * 0.02).bfloat16() for name, shape in shapes.items()}
    directory.mkdir(parents=True)
    names = sorted(tensors)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = directory / f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text("{}")
    (directory / "tokenizer.json").write_text(json.dumps({"tokens": list(range(1000))}))
    return directory


# --- one conversion ---------------------------------------------------------------------------------------------------


def start(source: Path, out: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Starts a conversion; returns its process id. Exit code 0 on success."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        prepare()
        convert(source, out, SETTINGS)
    except BaseException as error:  # noqa: BLE001 - the child must not continue the parent's code
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def finish(source: Path, out: Path) -> float:
    began = time.monotonic()
    _, status = os.waitpid(start(source, out), 0)
    if status != 0:
        raise SystemExit(f"an undisturbed conversion failed ({status}) with {sorted(file.name for file in out.iterdir())}")
    return time.monotonic() - began


def result(out: Path) -> dict[str, Any]:
    """Digest of every file; of the report, the fields that are reproducible."""
    files: dict[str, Any] = {}
    for file in sorted(out.rglob("*")):
        if file.is_file() and not file.name.startswith(REPORT):
            files[str(file.relative_to(out))] = hashlib.sha256(file.read_bytes()).hexdigest()
        elif file.is_dir():
            files[str(file.relative_to(out))] = "directory"
    report = json.loads((out / f"{REPORT}.json").read_text())
    files["report"] = {key: value for key, value in report.items() if key not in NOT_REPRODUCIBLE}
    return files


def stage(out: Path) -> str:
    """Progress of a killed conversion, judged by its files."""
    if not (out / JOURNAL).exists():
        return "finished" if (out / "config.json").exists() else "before the journal"
    if (out / "config.json").exists():
        return "config.json written, journal not yet removed"
    parts, whole = (len(list(out.glob(pattern))) for pattern in (".*.safetensors.part", "model*.safetensors"))
    if parts == 0:
        return "all weight files complete" if whole else "before the first file"
    return "some weight files complete" if whole else "no weight file complete"


# --- random moments ---------------------------------------------------------------------------------------------------


def random_kills(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    source = make_source(folder / "source")
    usual = min(finish(source, folder / f"whole-{number}") for number in range(3))
    expected = result(folder / "whole-0")
    done = outputs = identical = 0
    stages: Counter[str] = Counter()
    while done < kills:
        out = folder / f"out-{outputs}"
        for _ in range(min(draw.randint(1, MOST_KILLS), kills - done)):
            child = start(source, out)
            time.sleep(draw.uniform(0, 1.1 * usual))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if stage(out) == "finished":  # it finished before the kill
                break
            done += 1
            stages[stage(out)] += 1
        if stage(out) != "finished":
            finish(source, out)
        outputs += 1
        identical += result(out) == expected
        shutil.rmtree(out)
    return {"kills": done, "outputs": outputs, "identical": identical, "stages": dict(stages.most_common())}


# --- every system call that changes the disk ----------------------------------------------------------------------------------------


def ends_at(point: int, tally: Path | None = None) -> Callable[[], None]:
    """In the child: exits at the `point`th change to the disk; a write is done by half."""

    def prepare() -> None:
        calls = 0

        def counted(function: Callable[..., Any], is_write: bool) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                nonlocal calls
                calls += 1
                if tally is not None:
                    tally.write_text(str(calls))
                if calls == point:
                    if is_write:
                        function(args[0], args[1][: len(args[1]) // 2], *args[2:])
                    os._exit(77)
                return function(*args, **more)

            return call

        for name in ("write", "pwrite", "fsync", "fdatasync", "ftruncate", "posix_fallocate"):
            setattr(os, name, counted(getattr(os, name), "write" in name))
        for name in ("replace", "unlink"):
            setattr(Path, name, counted(getattr(Path, name), False))

    return prepare


def every_point(folder: Path, step: int) -> dict[str, Any]:
    """Each point alone, then a chain in which every resumed conversion is killed a little later than the one before."""
    source = make_source(folder / "source")
    whole, tally = folder / "whole", folder / "tally"
    os.waitpid(start(source, whole, ends_at(0, tally)), 0)
    expected, total = result(whole), int(tally.read_text())
    points = sorted({*range(1, total + 1, step), *range(total - LAST_POINTS, total + 1)})
    identical, stages = 0, Counter[str]()
    for point in points:
        out = folder / f"out-{point}"
        os.waitpid(start(source, out, ends_at(point)), 0)
        stages[stage(out)] += 1
        if stage(out) != "finished":
            finish(source, out)
        identical += result(out) == expected
        shutil.rmtree(out)
    chain, links = folder / "chain", 0
    while os.waitpid(start(source, chain, ends_at(1 + links * CHAIN_STEP)), 0)[1] != 0:
        links += 1
    found = {"points": total, "outputs": len(points) + 1, "identical": identical + (result(chain) == expected)}
    return found | {"stages": dict(stages), "kills of the last output": links}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", type=int, metavar="STEP", help="instead: kill at every STEPth change to the disk")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="windlass-kills-") as folder:
        found = every_point(Path(folder), args.points) if args.points else random_kills(Path(folder), args.kills, args.seed)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
