"""llama.cpp's logits of the same tokens, in an environment that has `llama-cpp-python`: python llama_logits.py MODEL.gguf OUT.npy < token ids"""

from __future__ import annotations

import sys

import numpy as np

WINDOW = 512


def main() -> None:
    import llama_cpp

    path, out = sys.argv[1:3]
    tokens = [int(word) for word in sys.stdin.read().split()]
    llama = llama_cpp.Llama(path, n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, n_threads=2, verbose=False)
    kept = []
    for first in range(0, len(tokens), WINDOW):
        window = tokens[first : first + WINDOW]
        llama.reset()
        llama.eval(window)
        kept.append(llama.scores[: len(window)].copy())
    np.save(out, np.concatenate(kept).astype(np.float32))


if __name__ == "__main__":
    main()
