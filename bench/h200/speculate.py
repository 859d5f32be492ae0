"""One stream of a model with an MTP layer, and lookup on a prompt that repeats itself, through the Engine on one GPU, without HTTP.

Random weights of a published shape, greedy. Random weights predict nothing, so acceptance is FORCED, inside of the steps' graphs: the logit of a
draft is made the largest of its row with the given chance, else the smallest. Steps, kernels and host are those of a real run; only which tokens come
out is not. Tokens/s are of decoding: from the first token to the last.
Run: PYTHONPATH=src python bench/h200/speculate.py
     PYTHONPATH=src python bench/h200/speculate.py --rows    # and steps of 1 to 4 sequences by the kernels of few rows and by those of 2 to 8
     PYTHONPATH=src python bench/h200/speculate.py --acceptance 0.5,0.8 --lookup "" --only auto    # besides 0.2
     PYTHONPATH=src python bench/h200/speculate.py --check   # first, with drafts and without, by the model's own choice: the same tokens? And
                                                             # the logits of the same tokens in steps of several rows and of one
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
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import build, make_engine
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.schedule.scheduler import Chunk
from windlass.runtime.engine.schedule.sequence import Sequence
from windlass.runtime.engine.speculate.speculation import Speculation
from windlass.runtime.kernels.step import Step
from windlass.runtime.nn.decoder import Decoder

STRATA, DRAWN, APART = 20, 20 * 4096, 20 * 421


class Forced:
    """Which drafts are accepted: numbers that were drawn before, one after another. Every 20 of them lie in 20 different twentieths, so that a few
    hundred drafts have the rate that was asked for; real ones come in longer runs, right or wrong."""

    def __init__(self) -> None:
        self.rate = torch.zeros(1, device="cuda")
        self._drawn = drawn(1).to("cuda")
        self._place = torch.zeros(1, dtype=torch.int64, device="cuda")

    def __call__(self, logits: Tensor, step: Step) -> None:
        rows = torch.arange(logits.shape[0], device=logits.device)
        draft = step.tokens.roll(-1).long()[:, None]
        is_drafted = (step.positions.roll(-1) == step.positions + 1) & (rows < logits.shape[0] - 1)
        is_taken = self._drawn[(self._place + APART * rows) % DRAWN] < self.rate
        self._place += 1
        forced = torch.where(is_taken, 1e30, -1e30)[:, None]
        logits.scatter_(1, draft, torch.where(is_drafted[:, None], forced, logits.gather(1, draft)))


def drawn(seed: int) -> Tensor:
    """Numbers from 0 to 1."""
    source = torch.Generator().manual_seed(seed)
    order = torch.rand(DRAWN // STRATA, STRATA, generator=source).argsort(1)
    return ((order + torch.rand(order.shape, generator=source)) / STRATA).flatten()


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


def known(speculation: Speculation) -> str:
    """What it went by, at the end."""
    found = [
        f"{source}: "
        + ", ".join(f"{rows} rows {seconds * 1e3:.2f} ms" for rows, seconds in control.costs.seconds)
        + f", acceptance {control.acceptance.rate:.2f}, {control.tried} steps with drafts, {control.idle_steps} without since"
        for source, control in speculation.controls.items()
    ]
    return (
        "      " + "; ".join(found) + f"; a step that is not launched ahead takes {speculation.waiting_seconds * 1e3:.2f} ms more"
    )


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
    engine.measure_waiting()
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


def check(launch: Launch, decoder: Decoder, prompts: list[list[int]], answer: int) -> list[str]:
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
            if how == "mtp":
                rows = [
                    f"  steps of several rows against one, {answer} tokens after each of {len(prompts)} prompts (1 row: computed again)"
                ]
                for number, prompt in enumerate(prompts):
                    rows += compare_rows(engine, prompt + found["off"][number], len(prompt), (1, 2, 4, 8))
                print("\n".join(rows), flush=True)
                return rows
    return []


def logits_of(engine: Engine, sequence: Sequence, text: list[int], begin: int, width: int) -> Tensor:
    """Of the tokens from `begin` on, `width` of them in a step, as a step computes them that verifies drafts."""
    found: list[Tensor] = []
    for at in range(begin, len(text), width):
        sequence.tokens = text[: at + 1]
        drafts = tuple(text[at + 1 : at + width])
        found.append(engine.runner.run([Chunk(sequence, at, at + 1 + len(drafts), at, drafts)]).clone())
    return torch.cat(found)


def compare_rows(engine: Engine, text: list[int], begin: int, widths: tuple[int, ...]) -> list[str]:
    """The same tokens in steps of one row, and again in steps of several: how far are logits apart, and where another token is the most likely, how
    far ahead was the first one?"""
    engine.submit(Submit(id=0, token_ids=text, sampling=GREEDY, max_tokens=2))
    while not any(output.token_ids for output in engine.step()):
        pass
    sequence = engine.scheduler.running[0]
    one, table = logits_of(engine, sequence, text, begin, 1), list[str]()
    best = one.topk(2, -1).values
    following = torch.tensor(text[begin + 1 :], device=one.device)[:, None]
    for width in widths:
        other = logits_of(engine, sequence, text, begin, width)
        error = (other - one).norm(dim=-1) / one.norm(dim=-1)
        logprobs = [rows.log_softmax(-1)[:-1].gather(1, following) for rows in (one, other)]
        apart = (logprobs[0] - logprobs[1]).abs()
        turned = other.argmax(-1) != one.argmax(-1)
        lead = (best[:, 0] - best[:, 1]) / one.std(-1)
        moved = (other - one).std(-1) / one.std(-1)
        table.append(
            f"  {width} rows: logits differ by {error.median():.1e}, worst {error.max():.1e} (first rows {error[::width].median():.1e}, last rows "
            f"{error[width - 1 :: width].median():.1e}); log-probabilities by {apart.mean():.4f}, worst {apart.max():.4f}; another token first in "
            f"{int(turned.sum())} of {len(turned)}"
            + (f", which led by at most {(lead / moved)[turned].max():.1f} sigma of the change" if turned.any() else "")
        )
    engine.cancel(0)
    return table


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
    parser.add_argument("--only", choices=("mtp", "ngram", "auto"))
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
    table: list[str] = []
    if options.check:
        table += check(launch, decoder, [[source.randrange(vocab) for _ in range(100 + 50 * n)] * 2 for n in range(4)], 128)
    prompts = [[source.randrange(vocab) for _ in range(options.prompt)] for _ in range(4)]
    table += by_rows(launch, decoder, prompts, 128) if options.rows else []
    plain = None
    if options.acceptance or options.lookup:
        with engine_for(launch, decoder, "off") as engine:
            row, plain = measured("off", engine, prompts[:1], options.answer, None)
            table.append(row)
    forced = Forced()
    # Lookup finds what the prompt has said before only if the answer follows it: the prompt begins to repeat itself.
    repeated = [prompts[0] + prompts[0][:8]]
    kinds = (("mtp", options.acceptance), ("ngram", options.lookup), ("auto", options.acceptance and f"0.2,{options.acceptance}"))
    for how, rates in (kind for kind in kinds if kind[1] and options.only in (None, kind[0])):
        with engine_for(launch, decoder, how, forced) as engine:
            for rate in map(float, rates.split(",")):
                forced.rate.fill_(rate)
                assert engine.speculation is not None
                engine.speculation.reset()  # of what it learned about another rate
                given = repeated if how == "ngram" else prompts[:1]
                table.append(measured(f"{how}, {rate:.1f} FORCED", engine, given, options.answer, plain)[0])
                if how == "auto":
                    table.append(known(engine.speculation))
                    print(table[-1], flush=True)
    print("\n" + "\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
