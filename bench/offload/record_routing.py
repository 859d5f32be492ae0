"""Writes which experts the bundled mixture chooses, and which it would have been guessed to choose, token by token: for replays on a GPU.

A line is a token that tiny-glm (16 experts, 4 active) decodes while it answers its own held-out tasks, greedily. A word is a layer with experts: the
four that it chose as hexadecimal digits, the most likely first, then the four that its router chooses with what enters the experts of the layer
before, under its own norm (runtime/nn/fused/feed_forward.py); the first layer's are dots.
Run: PYTHONPATH=src python bench/offload/record_routing.py > bench/h200/tiny_glm_routing.txt
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from windlass.core.launch import Launch
from windlass.core.request import GREEDY
from windlass.model.bundled.models import find_bundled
from windlass.model.bundled.tasks import held_out
from windlass.runtime.engine.load import build, make_engine
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.kernels.ops.route import route
from windlass.runtime.nn.moe import MixtureOfExperts
from windlass.runtime.weights.text.files import model_text

TOKENS = 480


def main() -> None:
    folder = find_bundled("tiny-glm")
    assert folder is not None
    launch = Launch(model=str(folder), device="cpu", max_sequences=1)
    decoder = build(launch, "cpu").decoder
    layers: list[Any] = [layer for layer in decoder.layers if isinstance(layer.feed_forward, MixtureOfExperts)]
    lines: list[list[str]] = []
    guessed: dict[int, str] = {}

    def digits(ids: Tensor) -> str:
        return "".join(f"{expert:x}" for expert in ids[0].tolist())

    def entering(number: int, x: Tensor) -> None:
        """Chooses with this layer's rows what the next one would."""
        if x.shape[0] != 1 or number + 1 == len(layers):
            return
        this, following = layers[number], layers[number + 1]
        moe, scale = following.feed_forward, following.ffn_norm.weight.float() / this.ffn_norm.weight.float()
        ids, _ = route(moe.router((x.float() * scale).to(x.dtype)), moe.correction, moe.moe.router, moe.moe.num_active, moe.first)
        guessed[number + 1] = digits(ids)

    def chosen(number: int, ids: Tensor) -> None:
        if ids.shape[0] != 1:  # a prompt
            return
        if number == 0:
            lines.append([])
        if lines:
            lines[-1].append(digits(ids) + guessed.get(number, "...."))

    for number, layer in enumerate(layers):
        layer.feed_forward.register_forward_pre_hook(lambda _, given, number=number: entering(number, given[0]))
        layer.feed_forward.routing_hook = lambda _, ids, weights, number=number: (chosen(number, ids), weights)[1]
    engine, text = make_engine(launch, decoder, "cpu", record=False), model_text(folder)
    for number, problem in enumerate(held_out(40)):
        prompt = f"[gMASK]<sop><|user|>{problem.prompt}<|assistant|>"
        tokens, stop = text.tokenizer.encode(prompt), list(text.stop_ids)
        engine.submit(Submit(id=number, token_ids=tokens, sampling=GREEDY, max_tokens=48, stop_token_ids=stop))
        while engine.has_work:
            engine.step()
        if len(lines) >= TOKENS:
            break
    print("\n".join(" ".join(line) for line in lines[:TOKENS]))
    pairs = [(set(word[:4]), set(word[4:])) for line in lines for word in line[1:]]
    print(f"{sum(len(a & b) for a, b in pairs) / (4 * len(pairs)):.1%} of {len(lines)} tokens guessed right", file=sys.stderr)


if __name__ == "__main__":
    main()
