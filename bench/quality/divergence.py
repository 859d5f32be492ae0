"""What 8-bit activations cost: KL divergence of next-token distributions to `--exact` with an fp32 cache, token by token over a text.

    python bench/quality/divergence.py MODEL.gguf TEXT [--tokens 2000] [--llama llama.npy]

`--llama`: logits [tokens, vocabulary] of llama.cpp for the same tokens, written by `bench/quality/llama_logits.py` in an environment of
its own. Prints the mean, median and 99th percentile of KL(exact || other) in nats, and how often the most likely token is another.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

WINDOW = 512
"""Tokens that are scored at a time: each window begins anew, so that no context is longer than small models take."""


def main() -> None:
    arguments = _arguments()
    tokens = _tokens(arguments.model, Path(arguments.text).read_text(), arguments.tokens)
    if arguments.write_tokens:
        Path(arguments.write_tokens).write_text(" ".join(map(str, tokens)))
    exact = _log_softmax(_logits(arguments.model, tokens, "avx2", exact=True, kv="fp32"))
    print(f"{len(tokens):,} tokens in windows of {WINDOW}; KL(exact || other) in nats")
    print(f"{'':28} {'mean':>9} {'median':>9} {'99 %':>9}  other first token")
    for label, isa, kv in (
        ("AVX2, bf16 cache", "avx2", "bf16"),
        ("AVX2, fp32 cache", "avx2", "fp32"),
        ("AVX-512, bf16 cache", "avx512", "bf16"),
    ):
        _report(label, exact, _log_softmax(_logits(arguments.model, tokens, isa, exact=False, kv=kv)))
    _report("exact, bf16 cache", exact, _log_softmax(_logits(arguments.model, tokens, "avx2", exact=True, kv="bf16")))
    if arguments.llama:
        _report("llama.cpp", exact, _log_softmax(np.load(arguments.llama)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--llama", default="")
    parser.add_argument("--write-tokens", default="", help="write the token ids to this file, for llama_logits.py")
    return parser.parse_args()


def _tokens(model: str, text: str, count: int) -> list[int]:
    from windlass.runtime.weights.text.files import model_text

    return list(model_text(Path(model)).tokenizer.encode(text))[:count]


def _logits(model: str, tokens: list[int], isa: str, *, exact: bool, kv: str) -> np.ndarray:
    """In a process of its own, since the instruction set is chosen once."""
    file = Path(f"/tmp/windlass-divergence-{os.getpid()}.npy")
    command = [sys.executable, str(Path(__file__).with_name("logits.py")), model, str(file), str(int(exact)), kv]
    text = " ".join(map(str, tokens))
    subprocess.run(command, input=text, text=True, check=True, env=os.environ | {"WINDLASS_ISA": isa})
    try:
        return np.load(file)
    finally:
        file.unlink()


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _report(label: str, exact: np.ndarray, other: np.ndarray) -> None:
    divergence = (np.exp(exact) * (exact - other)).sum(axis=-1)
    flips = (exact.argmax(-1) != other.argmax(-1)).mean()
    middle, high = np.percentile(divergence, [50, 99])
    print(f"{label:28} {divergence.mean():9.5f} {middle:9.5f} {high:9.5f}  {flips:.2%}")


if __name__ == "__main__":
    main()
