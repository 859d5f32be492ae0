"""A full-size checkpoint in shared memory, served as it comes, and the table of loads over HTTP (`windlass bench --served`).

Random int4 weights under the names that `windlass convert` writes; the tokenizer is tiny-glm's with unused tokens added.
Run: PYTHONPATH=src:bench/h200 python bench/h200/served.py [--model GLM-4.5-Air] [--folder /dev/shm/model] -- BENCH OPTIONS...
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from engine_speed import shape_of
from safetensors.torch import save_file

from windlass.bundled.models import find_bundled
from windlass.convert.outputs import ConvertedTensor, PackingChoices, converted_tensors
from windlass.convert.quantization import quantization_config
from windlass.core.scheme import scheme
from windlass.families import rules

WRITERS = 6


def make_checkpoint(folder: Path, name: str) -> None:
    config, spec = shape_of(name)
    how = scheme("int4", 128)
    made = converted_tensors(spec, rules(spec), PackingChoices(scheme=how, mtp=False))
    files: dict[str, list[ConvertedTensor]] = defaultdict(list)
    for one in made:
        files[f"model-{'rest' if one.layer is None else f'{one.layer:03}'}.safetensors"].append(one)
    final, folder = folder, folder.with_name(folder.name + ".tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(WRITERS) as pool:
        maps = list(pool.map(lambda item: _write(folder, *item), files.items()))
    index = {"metadata": {}, "weight_map": {name: file for part in maps for name, file in part.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {**config, "quantization_config": quantization_config(made, how), "num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer(folder, spec.vocab_size)
    folder.rename(final)


def _write(folder: Path, file: str, tensors: list[ConvertedTensor]) -> dict[str, str]:
    numbers = {part.name: _numbers(one, part.name, part.shape) for one in tensors for part in one.file_tensors}
    save_file(numbers, folder / file, {"format": "pt"})
    return dict.fromkeys(numbers, file)


def _numbers(of: ConvertedTensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name.endswith("weight_packed"):
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda").cpu()
    if name.endswith("weight_scale"):
        return torch.full(shape, 1 / (4.6 * of.shape[1] ** 0.5), dtype=torch.bfloat16)
    if name.endswith("weight_shape"):
        return torch.tensor(of.shape)
    dtype = torch.float32 if of.stored.bits == 32 else torch.bfloat16
    if len(shape) == 1:
        return (torch.ones if name.endswith("norm.weight") else torch.zeros)(shape, dtype=dtype)
    return (torch.randn(shape, device="cuda") / shape[1] ** 0.5).to(dtype).cpu()


def _tokenizer(folder: Path, vocab_size: int) -> None:
    source = find_bundled("tiny-glm")
    assert source is not None
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    used = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab.update({f"t{number}": number for number in range(vocab_size) if number not in used})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/model"))
    parser.add_argument("bench", nargs="*", help="further options of `windlass bench --served`")
    options = parser.parse_args()
    if not options.folder.is_dir():
        began = time.perf_counter()
        make_checkpoint(options.folder, options.model)
        size = sum(file.stat().st_size for file in options.folder.iterdir())
        print(f"{size / 1e9:.1f} GB of {options.model} written in {time.perf_counter() - began:.1f} s", flush=True)
    torch.cuda.empty_cache()
    return subprocess.run([sys.executable, "-m", "windlass", "bench", "--served", str(options.folder), *options.bench]).returncode


if __name__ == "__main__":
    sys.exit(main())
