"""Writes the logits of every position of some tokens as a .npy file, for bench/quality/divergence.py.

python bench/quality/logits.py MODEL OUT.npy EXACT(0|1) KV < token ids
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

WINDOW = 512


def main() -> None:
    from windlass.core.launch import Launch
    from windlass.runtime.engine.load import load_model
    from windlass.runtime.engine.protocol import Submit

    model, out, exact, kv = sys.argv[1:5]
    tokens = [int(word) for word in sys.stdin.read().split()]
    engine, _ = load_model(
        Launch(model=model, device="cpu", exact=exact == "1", kv=kv, context_tokens=WINDOW + 8, max_sequences=1)
    )
    kept: list[np.ndarray] = []

    def keep(chunk: Any, logits: Any) -> None:
        stop = min(chunk.stop, chunk.sequence.num_prompt)
        kept.append(logits[: stop - chunk.logits_from].numpy().astype(np.float32))

    engine._score = keep  # type: ignore[method-assign]  # every position's logits pass through here, and nowhere else
    for number, first in enumerate(range(0, len(tokens), WINDOW)):
        window = tokens[first : first + WINDOW]
        engine.submit(Submit(id=number, token_ids=window, max_tokens=1, prompt_logprobs=0))
        before = sum(map(len, kept))
        while engine.has_work:
            engine.step()
        assert sum(map(len, kept)) - before == len(window), (sum(map(len, kept)) - before, len(window))
    engine.close()
    np.save(out, np.concatenate(kept))


if __name__ == "__main__":
    main()
