"""llama.cpp, driven by bench/run/versus.py through lines of JSON. Runs in an environment of its own that has `llama-cpp-python`.

Reads {"job": "prefill" | "decode", "batch": n, "tokens": n} from standard input and answers {"seconds": s}: one llama_decode call
per step, greedy choice by argmax, as a program built on it would do.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp as api
import numpy

PROMPT = 128
CLOCK = time.process_time if "cpu" in sys.argv[4:] else time.perf_counter


class Peer:
    def __init__(self, path: str, threads: int, batch: int) -> None:
        api.llama_backend_init()
        api.llama_log_set(_quiet, ctypes.c_void_p(0))
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = api.llama_context_default_params()
        params.n_ctx = 1024 * batch
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, params)
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(512, 0, 1)

    def step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, wants logits)."""
        self.batch.n_tokens = len(rows)
        for index, (token, position, sequence, logits) in enumerate(rows):
            self.batch.token[index] = token
            self.batch.pos[index] = position
            self.batch.n_seq_id[index] = 1
            self.batch.seq_id[index][0] = sequence
            self.batch.logits[index] = int(logits)
        if api.llama_decode(self.context, self.batch):
            raise SystemExit("llama_decode failed")

    def best(self, row: int) -> int:
        logits = api.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())

    def forget(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)

    def prefill(self, tokens: int) -> float:
        self.forget()
        rows = [(7 + index % 1000, index, 0, index == tokens - 1) for index in range(tokens)]
        started = CLOCK()
        self.step(rows)
        self.best(tokens - 1)
        return CLOCK() - started

    def decode(self, batch: int, tokens: int) -> float:
        self.forget()
        for sequence in range(batch):
            self.step([(7 + (index + sequence) % 1000, index, sequence, index == PROMPT - 1) for index in range(PROMPT)])
        chosen = [11 + sequence for sequence in range(batch)]
        started = CLOCK()
        for index in range(tokens):
            self.step([(token, PROMPT + index, sequence, True) for sequence, token in enumerate(chosen)])
            chosen = [self.best(row) for row in range(batch)]
        return CLOCK() - started


@api.llama_log_callback
def _quiet(level: int, text: bytes, data: object) -> None:
    pass


def main() -> None:
    path, threads, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    peer = Peer(path, threads, batch)
    print(json.dumps({"ready": api.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if job["job"] == "prefill":
            seconds = peer.prefill(job["tokens"])
        else:
            seconds = peer.decode(job["batch"], job["tokens"])
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
