"""A checkpoint as published, converted, loaded the normal way and run through the engine on a GPU: as many layers as the disk holds.

Random bf16 weights under their published names -> `windlass convert --quant int4` -> logits against the same codes as plain fp32 numbers
-> `windlass bench`. Run: PYTHONPATH=src python bench/h200/converted_model.py [--layers 4] [--folder /tmp/converted]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from engine_speed import make_step, shape_of, worst
from safetensors.torch import save_file

from windlass.core.model import ModelSpec
from windlass.core.rule import ModelPart
from windlass.model.families import rules
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.weights.load.checkpoint import CheckpointWeights
from windlass.runtime.weights.source import open_model

TOKENS, PAGES = 48, 3


def make_checkpoint(folder: Path, config: dict[str, object], spec: ModelSpec) -> None:
    """A file a layer, and one for the rest."""
    folder.mkdir(parents=True)
    files: dict[str, dict[str, torch.Tensor]] = {}
    weight_map: dict[str, str] = {}
    for rule in rules(spec):
        if rule.part is not ModelPart.MAIN or rule.copy_of is not None:
            continue
        for layer in rule.layers if rule.layers is not None else (None,):
            file = f"model-{'rest' if layer is None else f'{layer:03}'}.safetensors"
            for expert in range(rule.num_experts) if rule.num_experts else (None,):
                name = rule.sources[0].name.format(layer=layer, expert=expert)
                files.setdefault(file, {})[name] = _numbers(rule.shape, rule.ours)
                weight_map[name] = file
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _numbers(shape: tuple[int, ...], ours: str) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if ours.endswith("norm.weight") else torch.zeros(shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.randn(shape, device=device) / shape[1] ** 0.5).bfloat16().cpu()


def check(folder: Path) -> None:
    """The kernels against fp32 products with the same codes."""
    tokens = torch.randint(0, 1000, (16, TOKENS), dtype=torch.int32)
    with torch.inference_mode():
        opened = open_model(folder)
        began = time.perf_counter()
        weights = CheckpointWeights(opened, device="cuda", tiled=True)
        assert weights.tiled, "the converted checkpoint should fit the kernels"
        fast = Decoder(opened.spec, weights, 4096)
        torch.cuda.synchronize()
        seconds, size = time.perf_counter() - began, weights.total_bytes()
        print(f"loaded {size / 1e9:.2f} GB in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s", flush=True)
        exact = Decoder(opened.spec, CheckpointWeights(opened, device="cuda", dtype=torch.float32, keep_quantized=False), 4096)
        expected = exact(make_step(tokens, 0, TOKENS, PAGES)).view(16, TOKENS, -1).double()
        caches = fast.make_caches(16 * PAGES, device="cuda")
        read = fast(make_step(tokens, 0, TOKENS - 1, PAGES), caches)
        print(f"prompts    {worst(read, expected[:, :-1].flatten(0, 1))}", flush=True)
        print(f"next token {worst(fast(make_step(tokens, TOKENS - 1, TOKENS, PAGES), caches), expected[:, -1])}", flush=True)
        del fast, exact
        plain = Decoder(opened.spec, CheckpointWeights(opened, device="cuda", dtype=torch.bfloat16, keep_quantized=False), 4096)
        found = plain.bfloat16()(make_step(tokens, 0, TOKENS, PAGES)).view(16, TOKENS, -1)
        print(
            f"plain bf16 {worst(found.flatten(0, 1), expected.flatten(0, 1))} (PyTorch, the same weights: what bf16 costs)",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/converted"))
    options = parser.parse_args()
    config, spec = shape_of(options.model, options.layers)
    source, out = options.folder / "source", options.folder / "int4"
    shutil.rmtree(options.folder, ignore_errors=True)
    began = time.perf_counter()
    make_checkpoint(source, config, spec)
    print(f"{options.model}, {options.layers} layers made in {time.perf_counter() - began:.1f} s", flush=True)
    command = [sys.executable, "-m", "windlass"]
    began = time.perf_counter()
    subprocess.run([*command, "convert", str(source), str(out), "--quant", "int4"], check=True)
    print(f"converted in {time.perf_counter() - began:.1f} s", flush=True)
    shutil.rmtree(source)
    check(out)
    subprocess.run([*command, "bench", str(out), "--batch", "1,8,32,64", "--new-tokens", "64"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
