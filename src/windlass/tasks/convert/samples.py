"""Calibration tokens: text sampled from the model itself, or from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from windlass.core.launch import Launch
from windlass.core.request import Sampling
from windlass.errors import BadInput
from windlass.runtime.engine.load import load_model
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.weights.text.files import model_text

Samples = tuple[tuple[int, ...], ...]

SEQUENCES, LENGTH = 64, 192
"""12,288 tokens; docs/log.md compares other amounts and texts."""
SELF = "self"


Progress = Callable[[int, int], None]
"""Tokens sampled so far, and of how many."""


def samples_for(path: Path, origin: str, progress: Progress = lambda done, total: None) -> Samples:
    """`origin`: `self`, or a text file."""
    return sample_from_model(path, progress=progress) if origin == SELF else sample_from_file(path, Path(origin))


def sample_from_model(
    path: Path, sequences: int = SEQUENCES, length: int = LENGTH, progress: Progress = lambda done, total: None
) -> Samples:
    """Sampled at temperature 1, starting from BOS or a stop token: the training distribution, without any data."""
    engine, info = load_model(Launch(model=str(path), device="cpu", context_tokens=length, max_sequences=32))
    try:
        starts = _starts(path, info.stop_token_ids)
        prompts = {number: [starts[number % len(starts)]] for number in range(1, sequences + 1)}
        for number, prompt in prompts.items():
            engine.submit(Submit(number, prompt, Sampling(temperature=1.0, seed=number), length - 1))
        while engine.has_work:
            for output in engine.step():
                prompts[output.id] += output.token_ids
            progress(sum(map(len, prompts.values())), sequences * length)
    finally:
        engine.close()
    return tuple(tuple(tokens) for tokens in prompts.values())


def _starts(path: Path, stops: tuple[int, ...]) -> list[int]:
    """Tokens a document may start with: BOS, and end-of-text tokens, which separate documents in training."""
    text = model_text(path)
    begin = text.tokenizer.token_id(text.special_tokens.get("bos_token", ""))
    return list(dict.fromkeys([*([] if begin is None else [begin]), *text.stop_ids, *stops])) or [0]


def sample_from_file(path: Path, file: Path) -> Samples:
    try:
        tokens = model_text(path).tokenizer.encode(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--calibrate takes `self` or a text file; {file} cannot be read: {error}") from None
    count = min(len(tokens) // LENGTH, SEQUENCES)
    if count < 1:
        raise BadInput(f"{file} has {len(tokens)} tokens; calibration needs at least {LENGTH}, better {SEQUENCES * LENGTH:,}")
    # Evenly spaced over the text.
    stride = len(tokens) // count
    return tuple(tuple(tokens[start : start + LENGTH]) for start in range(0, count * stride, stride))
