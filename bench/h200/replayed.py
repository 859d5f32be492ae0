"""Routing of a trained mixture on a GPU with most experts in host memory: what tiny-glm chose (tiny_glm_routing.txt), forced on GLM-4.5-Air's shape.

Expert j of tiny-glm's 16 stands for Air's experts 8 j .. 8 j + 7. Of each of the four that a token chose, two of the eight are taken, drawn anew for
each token and layer (the same two where the expert was guessed): which blocks are preferred, for how long, and how well they are guessed is
tiny-glm's; within a block all are equal. Layer l of Air takes tiny-glm's layer l mod 8, shifted by a part of the experts, so that not all layers
prefer the same. The choice is forced by the routers' corrections, copied before each step; guesses get those of tiny-glm's guesses. Prints tokens/s,
hits and guesses: with experts that stay where they are, then with experts that change places by use.
Run: PYTHONPATH=src:bench/h200 python bench/h200/replayed.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from guesses import decode, opened, told, use_guesses

from windlass.runtime.nn.fused.feed_forward import OffloadedFeed

TRACE = Path(__file__).parent / "tiny_glm_routing.txt"
BLOCK, EACH, FORCED = 8, 2, 10.0


def corrections(layers: int, experts: int) -> torch.Tensor:
    """fp32 [tokens, layers, 2, experts]: of what is chosen, and of what is guessed."""
    lines = [line.split() for line in TRACE.read_text().splitlines()]
    found = torch.zeros(len(lines), layers, 2, experts)
    source = torch.Generator().manual_seed(1)
    for token, line in enumerate(lines):
        for layer in range(layers):
            word, shift = line[layer % len(line)], experts * layer // layers
            drawn = [torch.randperm(BLOCK, generator=source)[:EACH] for _ in range(16)]
            for kind, digits in enumerate((word[:4], word[4:])):
                for rank, digit in enumerate(digits if digits[0] != "." else word[:4]):
                    at = (int(digit, 16) * BLOCK + drawn[int(digit, 16)] + shift) % experts
                    found[token, layer, kind, at] = FORCED - rank
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--new", type=int, default=240)
    parser.add_argument("--gpu-memory", default="24GB")
    parser.add_argument("--host-memory", default="64GB")
    options = parser.parse_args()
    engine, tier = opened(options, [1], time.perf_counter())
    feeds = [layer.feed for layer in engine.runner._decoder.fused.layers if isinstance(layer.feed, OffloadedFeed)]
    trace = corrections(len(feeds), feeds[0].num_experts).pin_memory()
    forced = torch.zeros_like(trace[0], device="cuda")
    for number, feed in enumerate(feeds):
        feed.correction = forced[number, 0]
        if number:
            feeds[number - 1].next_correction = forced[number, 1]
    tokens = 0

    def force() -> None:
        nonlocal tokens
        forced.copy_(trace[tokens % len(trace)], non_blocking=True)
        tokens += 1

    promotions, tier.promotions = tier.promotions, None
    for name, guesses, moving in (
        ("fixed, no guesses", False, 0),
        ("fixed", True, 0),
        ("by use", True, 1),
        ("by use", True, 1),
        ("by use", True, 1),
    ):
        if guesses != OffloadedFeed.guesses or not tokens:
            use_guesses(engine, guesses)
        tier.promotions = promotions if moving else None
        run = decode(engine, tier, 1, options.new, force)
        hits = run.stats["expert_hits"] / max(run.stats["expert_hits"] + run.stats["expert_misses"], 1)
        moved = promotions.num_promoted if promotions is not None else 0
        print(f"{name:18s} {hits:.1%} found on the device; {moved} promoted;{told(run, tier, 1, guesses)}", flush=True)
    engine.close()
    tier.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
