"""What a KV cache in 8 bits costs, by how numbers are coded: over a text, with keys and values that a model really has.

    python bench/quality/kv_types.py MODEL.gguf TEXT [--tokens 1024]

Weights are exact (fp32), and so is all else: only keys and values are rounded, after rotation, as a cache holds them. Prints the error of
attention outputs (norm of the difference by the norm, mean over layers, and of the worst layer), and the KL divergence of next-token
distributions to those with fp32 keys and values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from windlass.core.launch import Launch
from windlass.runtime.engine.load import build
from windlass.runtime.kernels import fp8_cache
from windlass.runtime.kernels.arguments import AttentionArgs
from windlass.runtime.kernels.ops.attention import reference
from windlass.runtime.kernels.step import Step
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.mixers import attention as mixer
from windlass.runtime.weights.text.files import model_text

WINDOW = 512
Rounded = Callable[[Tensor], Tensor]


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def scaled(code: Rounded, largest: float, dims: tuple[int, ...]) -> Rounded:
    """With an fp32 scale for each group of numbers that share the dimensions not in `dims` (of tokens, heads, elements)."""

    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax(dims, keepdim=True).clamp(min=1e-30) / largest
        return code(x / scale) * scale

    return rounded


def integers(x: Tensor) -> Tensor:
    """With the smallest power of two by which the largest fits."""
    scale = torch.exp2((x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127).log2().ceil())
    return (x / scale).round() * scale


def grouped(code: Rounded, size: int) -> Rounded:
    return lambda x: code(x.unflatten(-1, (-1, size))).flatten(-2)


WAYS: dict[str, Rounded] = {
    "bf16": lambda x: x.bfloat16().float(),
    "e4m3, no scale": e4m3,
    "e4m3, a scale for each head": scaled(e4m3, 448, (0, 2)),
    "e4m3, fp32 scale by token and head": scaled(e4m3, 448, (2,)),
    "e4m3, power of two by token and head": lambda x: fp8_cache.dequantize(*fp8_cache.quantize(x)),
    "e4m3, power of two by 32 numbers": grouped(lambda x: fp8_cache.dequantize(*fp8_cache.quantize(x)), 32),
    "e5m2, fp32 scale by token and head": scaled(lambda x: x.to(torch.float8_e5m2).float(), 57344, (2,)),
    "int8, power of two by token and head": integers,
    "int8, fp32 scale by token and head": scaled(torch.round, 127, (2,)),
    "int8, fp32 scale by 32 numbers": grouped(scaled(torch.round, 127, (3,)), 32),
}


def whole_step(tokens: list[int]) -> Step:
    count = len(tokens)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    everyone = ints(list(range(count)))
    return Step(
        tokens=ints(tokens), positions=everyone, slots=everyone, starts=ints([0, count]), lengths=ints([count]), blocks=ints([0])[None],
        logit_rows=everyone, counts=ints([count, 1, count]),
    )  # fmt: skip


class Errors:
    """Attention with rounded keys and values; beside it, how far each output is from the exact one of the same inputs."""

    def __init__(self, way: Rounded | None) -> None:
        self._way = way
        self.of_layers: list[float] = []

    def __call__(self, args: AttentionArgs) -> Tensor:
        exact = reference(args)
        if self._way is None:
            return exact
        found = reference(args._replace(k=self._way(args.k), v=self._way(args.v)))
        self.of_layers.append(((found - exact).norm() / exact.norm()).item())
        return found


def log_probabilities(decoder: Decoder, tokens: list[int], way: Rounded | None) -> tuple[Tensor, list[float]]:
    errors = Errors(way)
    mixer.attention = errors  # type: ignore[assignment]
    windows = [tokens[at : at + WINDOW] for at in range(0, len(tokens), WINDOW)]
    with torch.inference_mode():
        logits = torch.cat([decoder(whole_step(window)) for window in windows])
    return logits.double().log_softmax(-1), errors.of_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--only", default="", help="words of the ways to try")
    options = parser.parse_args()
    tokens = list(model_text(Path(options.model)).tokenizer.encode(Path(options.text).read_text()))[: options.tokens]
    decoder = build(Launch(model=options.model, device="cpu", exact=True, kv="fp32"), "cpu").decoder
    exact, _ = log_probabilities(decoder, tokens, None)
    print(f"{len(tokens):,} tokens in windows of {WINDOW}")
    print(f"{'':38} {'attention':>9} {'worst':>9} {'KL mean':>9} {'99 %':>9}  other first token")
    for name, way in ((name, way) for name, way in WAYS.items() if options.only in name):
        found, layers = log_probabilities(decoder, tokens, way)
        divergence = (exact.exp() * (exact - found)).sum(-1)
        flips = (exact.argmax(-1) != found.argmax(-1)).double().mean()
        print(
            f"{name:38} {sum(layers) / len(layers):9.2e} {max(layers):9.2e} {divergence.mean():9.2e} "
            f"{divergence.quantile(0.99):9.2e}  {flips:.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
