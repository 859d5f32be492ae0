"""One stream of a model with an MTP layer, and lookup on a prompt that repeats itself, through the Engine on one GPU, without HTTP.

Random weights of a published shape, greedy. Random weights predict nothing, so acceptance is FORCED, inside of the steps' graphs: the logit of a
draft is made the largest of its row with the given chance, else the smallest. Steps, kernels and host are those of a real run; only which tokens come
out is not. Tokens/s are of decoding: from the first token to the last.
Run: PYTHONPATH=src python bench/h200/speculate.py
     PYTHONPATH=src python bench/h200/speculate.py --rows    # and steps of 1 to 4 sequences by the kernels of few rows and by those of 2 to 8
     PYTHONPATH=src python bench/h200/speculate.py --check   # first, with drafts and without, by the model's own choice: the same tokens?
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
from engine_speed import shape_of
from torch import Tensor

from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY
from windlass.engine.engine import Engine
from windlass.engine.load import build, make_engine
from windlass.engine.protocol import Submit
from windlass.kernels.step import Step
from windlass.nn.decoder import Decoder

DRAWN = 2**16


class Forced:
    """Which drafts are accepted: numbers that were drawn before, one after another."""

    def __init__(self) -> None:
        self.rate = torch.zeros(1, device="cuda")
        self._drawn = torch.rand(DRAWN, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        self._place = torch.zeros(1, dtype=torch.int64, device="cuda")

    def __call__(self, logits: Tensor, step: Step) -> None:
        rows = torch.arange(logits.shape[0], device=logits.device)
        draft = step.tokens.roll(-1).long()[:, None]
        is_drafted = (step.positions.roll(-1) == step.positions + 1) & (rows < logits.shape[0] - 1)
        is_taken = self._drawn[(self._place + rows) % DRAWN] < self.rate
        self._place += 61  # so that steps of several drafts share no number soon
        forced = torch.where(is_taken, 1e30, -1e30)[:, None]
        logits.scatter_(1, draft, torch.where(is_drafted[:, None], forced, logits.gather(1, draft)))


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


def measured(label: str, engine: Engine, prompts: list[list[int]], answer: int, plain: float | None) -> tuple[str, float]:
    """A row of the table, and tokens/s."""
    decode(engine, prompts, 32)
    before = engine.stats()
    speed, tokens, steps = decode(engine, [[token ^ 1 for token in prompt] for prompt in prompts], answer)
    after = engine.stats()
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    ratio = "" if plain is None else f", {speed / plain:.2f}x"
    row = (
        f"  {label:44s} {speed:7.1f} tokens/s{ratio}; {tokens / steps:.2f} tokens a step of {tokens / steps / speed * 1e3:.3f} ms"
    )
    row += f"; {accepted} of {drafted} drafts accepted ({accepted / drafted:.2f})" if drafted else ""
    print(row, flush=True)
    return row, speed


@contextmanager
def engine_for(launch: Launch, decoder: Decoder, how: str, forced: Forced | None = None) -> Iterator[Engine]:
    began = time.perf_counter()
    if decoder.fused is not None and how in ("off", "ngram"):
        decoder.fused.hidden = None  # of an engine before this one
    engine = make_engine(msgspec.structs.replace(launch, speculate=how), decoder, "cuda")
    graphs = engine.runner.verify_graphs
    if graphs is not None:
        graphs.alter = forced
    engine.runner.warm_up()  # prompts compile what they need when the first one comes, before anything is measured
    print(
        f"--speculate {how}: {engine.runner.mode}, warm after {time.perf_counter() - began:.1f} s"
        + (f"; drafts are not captured: {graphs.why_not}" if graphs is not None and graphs.why_not else ""),
        flush=True,
    )
    try:
        yield engine
    finally:
        engine.close()
        del engine
        torch.cuda.empty_cache()


def check(launch: Launch, decoder: Decoder, prompts: list[list[int]], answer: int) -> None:
    """Rounding depends on the rows of a step, so near ties may go the other way: where do answers first differ?"""
    found: dict[str, dict[int, list[int]]] = {}
    for how in ("off", "ngram", "mtp"):
        with engine_for(launch, decoder, how) as engine:
            tokens: dict[int, list[int]] = {}
            for number, prompt in enumerate(prompts):
                engine.submit(Submit(id=number, token_ids=prompt, sampling=GREEDY, max_tokens=answer))
                while engine.has_work:  # one at a time: rows of a step are then those of one sequence
                    for output in engine.step():
                        tokens.setdefault(output.id, []).extend(output.token_ids)
            found[how] = tokens
            stats = engine.stats()
            same = [
                next((i for i, (a, b) in enumerate(zip(found["off"][n], tokens[n], strict=True)) if a != b), answer)
                for n in tokens
            ]
            print(
                f"  {stats.accepted} of {stats.drafted} accepted; the same as without up to token {same} of {answer}", flush=True
            )


def by_rows(launch: Launch, decoder: Decoder, prompts: list[list[int]], answer: int) -> list[str]:
    """Steps of several sequences, by either kind of kernels."""
    assert decoder.fused is not None
    most, rows = decoder.fused._most_few, list[str]()
    for few in (1, most):
        decoder.fused._most_few = few
        with engine_for(launch, decoder, "off") as engine:
            for count in range(2, len(prompts) + 1):
                name = "kernels of 2 to 8 rows" if few == 1 else "kernels of few rows"
                rows.append(measured(f"{count} at once, {name}", engine, prompts[:count], answer, None)[0])
    decoder.fused._most_few = most
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--acceptance", default="0.6,0.7,0.8,0.9")
    parser.add_argument("--lookup", default="0.3,0.6,0.9")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    config, _ = shape_of(options.model)
    if options.layers:
        config["num_hidden_layers"] = options.layers
    launch = Launch(
        model=options.model, device="cuda", random_weights=RandomInit(config=config, scheme="int4", group=128), speculate="mtp",
        max_sequences=4, context_tokens=4096, max_step_tokens=2048,
    )  # fmt: skip
    began = time.perf_counter()
    decoder = build(launch, "cuda").decoder
    assert decoder.mtp is not None, "this model has no MTP layer"
    print(f"{torch.cuda.get_device_name()}: weights after {time.perf_counter() - began:.1f} s", flush=True)
    source = random.Random(0)
    vocab = decoder.spec.vocab_size - 2
    if options.check:
        check(launch, decoder, [[source.randrange(vocab) for _ in range(100 + 50 * n)] * 2 for n in range(4)], 128)
    prompts = [[source.randrange(vocab) for _ in range(options.prompt)] for _ in range(4)]
    table = by_rows(launch, decoder, prompts, 128) if options.rows else []
    with engine_for(launch, decoder, "off") as engine:
        row, plain = measured("off", engine, prompts[:1], options.answer, None)
        table.append(row)
    forced = Forced()
    # Lookup finds what the prompt has said before only if the answer follows it: the prompt begins to repeat itself.
    repeated = [prompts[0] + prompts[0][:8]]
    for how, rates in (("mtp", options.acceptance), ("ngram", options.lookup), ("auto", options.acceptance)):
        with engine_for(launch, decoder, how, forced) as engine:
            for rate in map(float, ("0.2," + rates if how == "auto" else rates).split(",")):
                forced.rate.fill_(rate)
                assert engine.speculation is not None
                engine.speculation.reset()  # of what it learned about another rate
                given = repeated if how == "ngram" else prompts[:1]
                table.append(measured(f"{how}, {rate:.1f} FORCED", engine, given, options.answer, plain)[0])
    print("\n" + "\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
