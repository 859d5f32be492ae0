"""How often the bundled model accepts the drafts of its MTP layer, by place, on problems that it was not trained on.

Three drafts a step, whatever pays. Greedy, and sampled at temperature 1: with the most likely tokens as drafts, as the engine does, and with
drafts that are drawn with the random numbers of the tokens they guess (the same output either way).
Run: python bench/speculate/acceptance.py [MODEL] --problems 20
     python bench/speculate/acceptance.py --problems 20 --int4-head    # drafts by the head in 4 bits, as on a GPU
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "src"))

import msgspec  # noqa: E402
import torch  # noqa: E402

from windlass.core.launch import Launch  # noqa: E402
from windlass.core.request import GREEDY, Sampling  # noqa: E402
from windlass.model.bundled.tasks import held_out  # noqa: E402
from windlass.open.resolve import model_files  # noqa: E402
from windlass.runtime.engine.client.text_processor import TextProcessor  # noqa: E402
from windlass.runtime.engine.engine import Engine  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.engine.protocol import Submit  # noqa: E402
from windlass.runtime.engine.sample.sampler import SamplingState  # noqa: E402
from windlass.runtime.engine.schedule.scheduler import Chunk  # noqa: E402
from windlass.runtime.engine.schedule.sequence import Sequence as EngineSequence  # noqa: E402
from windlass.runtime.engine.speculate import model as drafting  # noqa: E402
from windlass.runtime.engine.speculate import setup  # noqa: E402
from windlass.runtime.engine.speculate import speculation as speculating  # noqa: E402
from windlass.runtime.kernels.cuda import layout  # noqa: E402
from windlass.runtime.nn.mtp import MtpLayer  # noqa: E402
from windlass.runtime.nn.mtp_pass import MtpDecoder, MtpPass  # noqa: E402
from windlass.runtime.weights.text.files import model_text  # noqa: E402

DRAFTS = 3
PROGRAMS = (
    "import os\n\ndef ",
    "class Reader:\n    def __init__(self",
    "# Copyright",
    "    for name in names:\n        if ",
    '"""Returns the',
)


def judged(engine: Engine, requests: list[Submit]) -> tuple[list[list[bool]], int, int]:
    """Verdicts of the drafts at each place, tokens and steps."""
    verdicts: list[list[bool]] = [[] for _ in range(DRAFTS)]
    made = engine.speculation
    assert made is not None
    judge: Callable[[Chunk, int], None] = made._judge

    def watched(chunk: Chunk, accepted: int) -> None:
        for place in range(min(accepted + 1, len(chunk.drafts))):
            verdicts[place].append(place < accepted)
        judge(chunk, accepted)

    made._judge = watched  # type: ignore[method-assign]
    before = engine.stats()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    made._judge = judge  # type: ignore[method-assign]
    after = engine.stats()
    return verdicts, after.completion_tokens - before.completion_tokens, after.steps - before.steps


def main() -> int:
    parser = argparse.ArgumentParser(description="Acceptance of an MTP layer.")
    parser.add_argument("model", nargs="?", default="tiny-glm")
    parser.add_argument("--problems", type=int, default=20, help="of each task; 20")
    parser.add_argument(
        "--text", action="store_true", help="instead: the model goes on with the beginnings of programs, where much is possible"
    )
    parser.add_argument("--int4-head", action="store_true", help="the layer drafts with the head rounded to 4 bits")
    given = parser.parse_args()
    if given.int4_head:
        setup.MtpPass = RoundedHead
    path = model_files(given.model, shown=True)
    text = model_text(path)
    asked = PROGRAMS * given.problems if given.text else tuple(problem.prompt for problem in held_out(given.problems, seed=3))
    processor = TextProcessor(text)
    engine, _ = load_model(Launch(model=str(path), device="cpu", max_sequences=1, speculate="mtp"))
    speculating.counts = lambda control, rates, *_: (DRAFTS,) * len(rates)  # type: ignore[assignment]
    usual = drafting.draft_state
    for label, sampling, state in (
        ("greedy", GREEDY, usual),
        ("temperature 1, most likely drafts", Sampling(temperature=1.0), usual),
        ("temperature 1, drafts by the same random numbers", Sampling(temperature=1.0), _drawn),
    ):
        drafting.draft_state = state
        requests = [
            Submit(
                number,
                processor.plain_tokens(prompt) if given.text else processor.chat_tokens([{"role": "user", "content": prompt}]),
                sampling if sampling.is_greedy else msgspec.structs.replace(sampling, seed=number),
                max_tokens=80,
                stop_token_ids=list(text.stop_ids),
            )
            for number, prompt in enumerate(asked)
        ]
        verdicts, tokens, steps = judged(engine, requests)
        shares = ", ".join(f"{sum(found) / max(len(found), 1):.3f} of {len(found)}" for found in verdicts)
        print(f"{label}: accepted by place {shares}; {tokens} tokens in {steps} steps", flush=True)
    return 0


class RoundedHead(MtpPass):
    """As the fused pass drafts."""

    def __init__(self, decoder: MtpDecoder, layer: MtpLayer, max_rows: int, device: torch.device | str) -> None:
        super().__init__(decoder, layer, max_rows, device)
        self.head = layout.dequantize(layout.quantized(self.head.detach()))[0].to(self.head.dtype)


def _drawn(sequence: EngineSequence, depth: int) -> SamplingState:
    state: SamplingState = sequence.request.sampling_state
    return SamplingState(state.sampling, state.seed, None, state.bias, state.is_argmax, num_sampled=state.num_sampled + depth)


if __name__ == "__main__":
    sys.exit(main())
