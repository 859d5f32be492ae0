"""What rounding the activations of prompts to 8 bits costs a real model, as the kernels for Hopper GPUs do it (runtime/kernels/cuda/int8.py): in
blocks of 128 inputs with a step each. On a CPU, in fp32 but for the inputs of the layers' products. Weights as they are stored.

    WINDLASS_NO_NATIVE=1 python bench/quality/prompt_rounding.py MODEL TEXT [--tokens 2000]

Prints KL divergence to exact inputs, how often the most likely token is another, and perplexity.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.runtime.kernels.step import Step
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.linear import Linear
from windlass.runtime.weights.load.checkpoint import CheckpointWeights
from windlass.runtime.weights.source import open_model
from windlass.runtime.weights.text.files import model_text

WINDOW = 512


def in_blocks(inputs: int | None) -> Callable[[Tensor], Tensor]:
    """Rounds rows to 8 bits with a step for each `inputs` of them, or for the whole row."""

    def rounded(x: Tensor) -> Tensor:
        parts = x.bfloat16().float().split(inputs or x.shape[-1], dim=-1)
        steps = [(part.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30) for part in parts]
        return torch.cat([(part / step).round() * step for part, step in zip(parts, steps, strict=True)], -1).to(x.dtype)

    return rounded


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda x: x.bfloat16().to(x.dtype),
    "8 bits, blocks of 128": in_blocks(128),
    "8 bits, blocks of 512": in_blocks(512),
    "8 bits, whole rows": in_blocks(None),
}


def whole_step(tokens: list[int]) -> Step:
    count = len(tokens)
    places, starts = torch.arange(count, dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
    lengths, none = torch.tensor([count], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    return Step(
        torch.tensor(tokens, dtype=torch.int32), places, places, starts, lengths, none, places,
        torch.tensor([count, 1, count], dtype=torch.int32), host_starts=starts, host_lengths=lengths,
    )  # fmt: skip


def log_probabilities(decoder: Decoder, windows: list[list[int]]) -> Tensor:
    return torch.cat([decoder(whole_step(window)).double().log_softmax(-1) for window in windows])


def report(name: str, exact: Tensor, other: Tensor, windows: list[list[int]]) -> None:
    divergence = (exact.exp() * (exact - other)).sum(-1)
    flips = (exact.argmax(-1) != other.argmax(-1)).double().mean()
    rows = other.split([len(window) for window in windows])
    losses = [-row[:-1].gather(1, torch.tensor(window[1:])[:, None]) for row, window in zip(rows, windows, strict=True)]
    perplexity = torch.cat(losses).mean().exp()
    print(
        f"{name:24} {divergence.mean():10.6f} {divergence.median():10.6f} {divergence.quantile(0.99):10.6f} {flips:8.2%} {perplexity:10.4f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    tokens = list(model_text(options.model).tokenizer.encode(options.text.read_text()))[: options.tokens]
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]
    opened = open_model(options.model)
    decoder = Decoder(opened.spec, CheckpointWeights(opened, dtype=torch.float32, keep_quantized=False), WINDOW)
    products = [part for part in decoder.layers.modules() if isinstance(part, Linear)]
    rounding: list[Callable[[Tensor], Tensor]] = []

    def hook(_module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounding[0](given[0]), *given[1:]) if rounding else given

    for part in products:
        part.register_forward_pre_hook(hook)
    with torch.inference_mode():
        exact = log_probabilities(decoder, windows)
        print(f"{len(tokens):,} tokens in windows of {WINDOW}, {len(products)} products; KL(exact || other) in nats")
        print(f"{'':24} {'mean':>10} {'median':>10} {'99 %':>10} {'other':>8} {'perplexity':>10}")
        report("exact", exact, exact, windows)
        for name, way in WAYS.items():
            rounding[:] = [way]
            report(name, exact, log_probabilities(decoder, windows), windows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
