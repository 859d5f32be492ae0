"""Tokens to calibrate with: what the model itself writes, or a text that the user gives."""

from __future__ import annotations

from pathlib import Path

from windlass.core.request import Sampling
from windlass.engine.load import load_model
from windlass.engine.protocol import Launch, Submit
from windlass.errors import BadInput
from windlass.weights.text.files import model_text

Samples = tuple[tuple[int, ...], ...]

SEQUENCES, LENGTH = 64, 192
"""12,288 tokens (docs/log.md has what fewer and other texts give)."""
SELF = "self"


def samples_for(path: Path, asked: str) -> Samples:
    """`asked`: `self`, or a file of text."""
    return sample_from_model(path) if asked == SELF else sample_from_file(path, Path(asked))


def sample_from_model(path: Path, sequences: int = SEQUENCES, length: int = LENGTH) -> Samples:
    """Drawn from the model at temperature 1, after each of its stop tokens in turn: the distribution it was taught, no data needed."""
    engine, info = load_model(Launch(model=str(path), device="cpu", context_tokens=length, max_sequences=32))
    try:
        starts = _starts(path, info.stop_token_ids)
        prompts = {number: [starts[number % len(starts)]] for number in range(1, sequences + 1)}
        for number, prompt in prompts.items():
            engine.submit(Submit(number, prompt, Sampling(temperature=1.0, seed=number), length - 1))
        while engine.has_work:
            for output in engine.step():
                prompts[output.id] += output.token_ids
    finally:
        engine.close()
    return tuple(tuple(tokens) for tokens in prompts.values())


def _starts(path: Path, stops: tuple[int, ...]) -> list[int]:
    """Tokens that a text may begin with: the tokenizer's own, and what ends a text, which stood between texts in training."""
    text = model_text(path)
    begin = text.tokenizer.token_id(text.special_tokens.get("bos_token", ""))
    return list(dict.fromkeys([*([] if begin is None else [begin]), *text.stop_ids, *stops])) or [0]


def sample_from_file(path: Path, file: Path) -> Samples:
    try:
        tokens = model_text(path).tokenizer.encode(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--calibrate is `self` or a file of text; {file} cannot be read: {error}") from None
    count = min(len(tokens) // LENGTH, SEQUENCES)
    if count < 1:
        raise BadInput(
            f"{file} has {len(tokens)} tokens; calibration needs at least {LENGTH}, and {SEQUENCES * LENGTH:,} are better"
        )
    # Spread over the whole text.
    stride = len(tokens) // count
    return tuple(tuple(tokens[start : start + LENGTH]) for start in range(0, count * stride, stride))
