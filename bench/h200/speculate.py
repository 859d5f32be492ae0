"""One stream of a model with an MTP layer, and lookup on a prompt that repeats itself, through the Engine on one GPU, without HTTP.

Random weights of a published shape, greedy. Random weights predict nothing, so acceptance is FORCED: a draft is taken with the given chance,
whatever the model says. Steps, kernels and host are those of a real run; only which tokens come out is not. Tokens/s are of decoding: from the
first token to the last.
Run: PYTHONPATH=src python bench/h200/speculate.py
     PYTHONPATH=src python bench/h200/speculate.py --check   # with drafts and without, by the model's own choice: the same tokens?
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

import msgspec
import torch
from engine_speed import shape_of

from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY
from windlass.engine.engine import Engine
from windlass.engine.load import build, make_engine
from windlass.engine.protocol import Submit
from windlass.nn.decoder import Decoder

Judge = Callable[[int, int | None], int | None]


def forced(rate: float, num_tokens: int) -> Judge:
    """Takes a draft with this chance."""
    chance = random.Random(1)

    def judge(draft: int, token: int | None) -> int | None:
        if chance.random() < rate:
            return draft
        return token if token != draft else (draft + 1) % num_tokens

    return judge


def decode(engine: Engine, prompts: list[list[int]], answer: int) -> tuple[float, int, int]:
    """Tokens/s of decoding, tokens and steps."""
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(id=number, token_ids=prompt, sampling=GREEDY, max_tokens=answer))
    waiting = set(range(len(prompts)))
    while waiting:
        waiting -= {output.id for output in engine.step() if output.token_ids}
    begun, tokens, steps = time.perf_counter(), 0, 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
        steps += 1
    return tokens / (time.perf_counter() - begun), tokens, steps


def shown(label: str, engine: Engine, prompts: list[list[int]], answer: int, plain: float | None) -> float:
    decode(engine, prompts, 32)
    before = engine.stats()
    speed, tokens, steps = decode(engine, [[token ^ 1 for token in prompt] for prompt in prompts], answer)
    after = engine.stats()
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    ratio = "" if plain is None else f", {speed / plain:.2f}x"
    print(
        f"  {label:34s} {speed:7.1f} tokens/s{ratio}; {tokens / steps:.2f} tokens a step of {tokens / steps / speed * 1e3:.2f} ms"
        + (f"; {accepted} of {drafted} drafts accepted ({accepted / drafted:.2f})" if drafted else ""),
        flush=True,
    )
    return speed


def engine_for(launch: Launch, decoder: Decoder, how: str) -> Engine:
    began = time.perf_counter()
    engine = make_engine(msgspec.structs.replace(launch, speculate=how), decoder, "cuda")
    engine.warm_up()
    graphs = engine.runner.verify_graphs
    print(
        f"--speculate {how}: {engine.runner.mode}, warm after {time.perf_counter() - began:.1f} s"
        + (f"; drafts are not captured: {graphs.why_not}" if graphs is not None and graphs.why_not else ""),
        flush=True,
    )
    return engine


def check(launch: Launch, decoder: Decoder, prompts: list[list[int]], answer: int) -> None:
    """Rounding depends on the rows of a step, so near ties may go the other way: where do answers first differ?"""
    found: dict[str, dict[int, list[int]]] = {}
    for how in ("off", "ngram", "mtp"):
        engine = engine_for(launch, decoder, how)
        tokens: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            engine.submit(Submit(id=number, token_ids=prompt, sampling=GREEDY, max_tokens=answer))
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.id, []).extend(output.token_ids)
        found[how] = tokens
        stats = engine.stats()
        same = [
            next((i for i, (a, b) in enumerate(zip(found["off"][n], tokens[n], strict=True)) if a != b), answer) for n in tokens
        ]
        print(f"  {stats.accepted} of {stats.drafted} accepted; the same as without up to token {same} of {answer}", flush=True)
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--at-once", default="1")
    parser.add_argument("--acceptance", default="0.6,0.7,0.8,0.9,1.0")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    config, _ = shape_of(options.model, options.layers)
    launch = Launch(
        model=options.model, device="cuda", random_weights=RandomInit(config=config, scheme="int4", group=128), speculate="mtp",
        max_sequences=8,
    )  # fmt: skip
    began = time.perf_counter()
    decoder = build(launch, "cuda").decoder
    assert decoder.mtp is not None, "this model has no MTP layer"
    print(f"{torch.cuda.get_device_name()}: weights after {time.perf_counter() - began:.1f} s", flush=True)
    source = random.Random(0)
    vocab = decoder.spec.vocab_size - 2
    if options.check:
        check(launch, decoder, [[source.randrange(vocab) for _ in range(100 + 50 * n)] * 2 for n in range(4)], 128)
        return 0
    for users in map(int, options.at_once.split(",")):
        prompts = [[source.randrange(vocab) for _ in range(options.prompt)] for _ in range(users)]
        engine = engine_for(launch, decoder, "off")
        plain = shown(f"{users} at once, without", engine, prompts, options.answer, None)
        engine.close()
        for how, label in (("mtp", "MTP"), ("ngram", "lookup, text that repeats")):
            engine = engine_for(launch, decoder, how)
            # Lookup finds what the prompt has said before only if the answer follows it: the prompt begins to repeat itself.
            given = prompts if how == "mtp" else [prompt + prompt[:8] for prompt in prompts]
            for rate in map(float, options.acceptance.split(",")):
                engine.judge = forced(rate, vocab)
                shown(f"{users} at once, {label}, {rate:.1f} FORCED", engine, given, options.answer, plain)
            engine.close()
            del engine
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
