"""Speculation on a CPU or a GPU: a prompt whose answer repeats most of it (editing a text), and one whose answer does not; with drafts and without.

Both answers have the same tokens with every kind of drafts, or the table says so (on a GPU near ties may go the other way: rounding depends on a
step's rows). Tokens/s are of decoding, the best of some rounds that take turns.
Run: python bench/speculate/editing.py SmolLM2-135M-Instruct.gguf
     python bench/speculate/editing.py SmolLM2-135M-Instruct.gguf --device cuda
     python bench/speculate/editing.py tiny-glm --speculate off,mtp,auto
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "src"))

from windlass.core.launch import Launch  # noqa: E402
from windlass.core.request import GREEDY  # noqa: E402
from windlass.open.drafts import with_draft_model  # noqa: E402
from windlass.open.resolve import model_files  # noqa: E402
from windlass.runtime.engine.client.text_processor import TextProcessor  # noqa: E402
from windlass.runtime.engine.engine import Engine  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.engine.protocol import Submit  # noqa: E402
from windlass.runtime.weights.text.files import model_text  # noqa: E402

TEXT = """The old lighthouse stood on a cliff above the harbour. Every evening its keeper climbed the stairs and lit the lamp. Ships far out at \
sea could see the light and knew that they were near home. One night a storm broke the glass, and the keeper held the lamp in his own hands \
until the morning came. The people of the town heard of it and brought him new glass, warm bread and a coat of thick wool. He thanked them \
all, and said that he had only done what anybody would have done."""
KV_BYTES = 2**28
PROMPTS = {
    "editing": f"Please proofread the following text. Return the complete text, with mistakes corrected and nothing else.\n\n{TEXT}",
    "writing": "Write a short story about a sailor who finds an old map.",
}


def decode(engine: Engine, tokens: list[int], answer: int, stops: list[int]) -> tuple[float, list[int]]:
    """Tokens/s from the first token on, and the tokens."""
    engine.submit(Submit(id=1, token_ids=tokens, sampling=GREEDY, max_tokens=answer, stop_token_ids=stops))
    found: list[int] = []
    while not found:
        found += [token for output in engine.step() for token in output.token_ids]
    began, first = time.perf_counter(), len(found)
    while engine.has_work:
        found += [token for output in engine.step() for token in output.token_ids]
    return (len(found) - first) / (time.perf_counter() - began), found


def rows_costs(engine: Engine) -> str:
    """Milliseconds of a step by its rows, as the engine measured them."""
    if engine.speculation is None:
        return ""
    costs = next(iter(engine.speculation.controls.values())).costs.seconds
    return "; ms by rows: " + ", ".join(f"{rows}: {seconds * 1e3:.2f}" for rows, seconds in costs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokens/s with drafts and without.")
    parser.add_argument("model")
    parser.add_argument("--speculate", default="off,ngram,auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--answer", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    path = model_files(given.model, shown=True)
    text = model_text(path)
    processor = TextProcessor(text)
    kv_bytes = KV_BYTES if given.device != "cpu" else None  # engines share the device
    launches = {
        how: Launch(model=str(path), device=given.device, max_sequences=1, speculate=how, kv_bytes=kv_bytes)
        for how in given.speculate.split(",")
    }
    engines = {how: load_model(with_draft_model(launch))[0] for how, launch in launches.items()}
    for name, prompt in PROMPTS.items():
        tokens = processor.chat_tokens([{"role": "user", "content": prompt}])
        answer = min(given.answer, next(iter(engines.values())).limits.longest_sequence - len(tokens))
        best: dict[str, float] = dict.fromkeys(engines, 0.0)
        answers: dict[str, list[int]] = {}
        for _ in range(given.rounds):
            for how, engine in engines.items():
                speed, answers[how] = decode(engine, tokens, answer, list(text.stop_ids))
                best[how] = max(best[how], speed)
        first = next(iter(engines))
        print(f"{name}: prompt of {len(tokens)} tokens, answer of {len(answers[first])}")
        for how, engine in engines.items():
            stats = engine.stats()
            same = "the same tokens" if answers[how] == answers[first] else "OTHER TOKENS"
            print(
                f"  {how:8s} {best[how]:7.1f} tokens/s, {best[how] / best[first]:.2f}x, {same}; "
                f"{stats.accepted} of {stats.drafted} drafts accepted so far{rows_costs(engine)}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
