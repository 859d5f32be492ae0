"""Ten thousand requests of random length, some cancelled, through one engine: nothing may be left behind in blocks or in memory.

Run: python bench/serve/engine_soak.py [MODEL] [--requests 10000]   (MODEL: a path; without it a small shape with random weights)
"""

from __future__ import annotations

import argparse
import random

from windlass.core.launch import Launch, RandomInit
from windlass.core.request import Sampling
from windlass.runtime.engine.load import load_model
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.machine.memory import process_memory

SMALL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
}  # fmt: skip
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.9, seed=1), Sampling(frequency_penalty=0.5, seed=2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=10_000)
    asked = parser.parse_args()
    made = None if asked.model else RandomInit(config=SMALL, scheme="int4", group=32)
    launch = Launch(
        model=asked.model or "small", device="cpu", context_tokens=512, max_sequences=16, kv_bytes=2**20, random_weights=made
    )
    engine, info = load_model(launch)
    chance = random.Random(0)
    submitted, alive, ended = 0, set(), 0
    looks: list[tuple[int, int]] = []
    while ended < asked.requests:
        while submitted < asked.requests and len(alive) < 40:
            submitted += 1
            prompt = [chance.randrange(min(info.vocab_size, 1000)) for _ in range(chance.randint(1, 200))]
            engine.submit(Submit(submitted, prompt, chance.choice(SAMPLINGS), chance.randint(1, 40)))
            alive.add(submitted)
        if alive and chance.random() < 0.1:
            number = chance.choice(sorted(alive))
            engine.cancel(number)
            alive.discard(number)
            ended += 1
        for output in engine.step():
            if output.finish is not None:
                alive.discard(output.id)
                ended += 1
        if ended // 1000 > len(looks):
            looks.append((ended, process_memory().anonymous_bytes))
            print(
                f"{ended:6,} ended, {looks[-1][1] / 2**20:.1f} MiB of own pages, {engine.stats().blocks_used} blocks held",
                flush=True,
            )
    stats = engine.stats()
    print(
        f"{stats.finished:,} finished, {stats.cancelled:,} cancelled, {stats.preemptions:,} preempted, {stats.blocks_used} blocks still held"
    )
    assert stats.blocks_used == 0
    print(f"memory from the second thousand to the last: {(looks[-1][1] - looks[1][1]) / 2**20:+.2f} MiB")


if __name__ == "__main__":
    main()
