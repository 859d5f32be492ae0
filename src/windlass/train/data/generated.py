"""Generated tasks straight to token shards: chats of a few problems each, of which the answers are learned.

Shards are made apart from one another by several processes, and each follows from the seed and its number alone. The chats are written
by a format string instead of the template, which would take longer than all the rest; that both give the same text is checked first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.text.chat import chat_template, render_chat
from windlass.text.tokenizer import Tokenizer, load_tokenizer
from windlass.train.data.fingerprint import tokenizer_fingerprint
from windlass.train.data.order import key
from windlass.train.data.shards import MANIFEST, Manifest, Shard, Split
from windlass.train.data.writing import ShardWriter, token_type_for, write_manifest
from windlass.train.tasks import draw

SHARD_TOKENS = 1 << 22
VALIDATION_TOKENS = 1 << 18
CHATS_AT_ONCE = 2048
LONGEST_CHAT = 4
"""Problems, one after another."""


class Style(Frozen):
    """How the template writes a chat."""

    start: str
    system: str
    user: str
    assistant: str
    end: str
    """Of an answer."""
    systems: tuple[str, ...] = ()
    """System messages; every tenth chat begins with one, so that they do not disturb."""


class Work(Frozen):
    tokenizer: str
    """The folder."""
    folder: str
    style: Style
    seed: int


def generate_tasks(
    tokenizer: Path,
    folder: Path,
    style: Style,
    *,
    num_tokens: int,
    seed: int = 0,
    jobs: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """About `num_tokens` for training and one shard of held-out problems. Shards that are there already are made again."""
    text = load_tokenizer(tokenizer)
    _check_style(text, style)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    work = Work(tokenizer=str(tokenizer), folder=str(folder), style=style, seed=seed)
    sizes = [min(SHARD_TOKENS, num_tokens - first) for first in range(0, num_tokens, SHARD_TOKENS)]
    jobs = jobs or len(os.sched_getaffinity(0))
    calls: list[tuple[Split, int, int]] = [
        ("validation", 0, VALIDATION_TOKENS),
        *(("train", place, size) for place, size in enumerate(sizes)),
    ]
    shards: list[Shard] = []
    with ProcessPoolExecutor(min(jobs, len(calls)), mp_context=get_context("spawn")) as pool:
        for shard in pool.map(_shard, [work] * len(calls), calls):
            shards.append(shard)
            advance(shard.num_tokens)
    end = text.token_id(style.end)
    manifest = Manifest(
        tokenizer=tokenizer_fingerprint(tokenizer),
        vocab_size=text.vocab_size,
        end_token=0 if end is None else end,
        token_type=token_type_for(text.vocab_size),
        shards=tuple(sorted(shards, key=lambda shard: shard.name)),
        sources=(f"generated tasks, seed {seed}",),
    )
    write_manifest(folder, manifest)
    return manifest


def _check_style(text: Tokenizer, style: Style) -> None:
    template = chat_template(text.config)
    if template is None:
        raise BadInput("this tokenizer has no chat template, which says how problems are to be asked")
    messages = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant", "user", "assistant")]
    written = _written(style, "SYSTEM", [("USER", "ASSISTANT")] * 2)
    if (rendered := render_chat(template, messages, add_generation_prompt=False)) != written:
        raise BadInput(f"the chat template writes {rendered!r}, and tasks would be written {written!r}")
    for mark in (style.assistant, style.end):
        if text.token_id(mark) is None:
            raise BadInput(f"{mark!r} is no token of this tokenizer, so that answers cannot be found again")


def _written(style: Style, system: str, turns: list[tuple[str, str]]) -> str:
    head = f"{style.start}{style.system}{system}" if system else style.start
    return head + "".join(f"{style.user}{prompt}{style.assistant}{answer}{style.end}" for prompt, answer in turns)


def _chats(style: Style, random: Random, held_out: bool) -> Iterator[str]:
    while True:
        turns: list[tuple[str, str]] = []
        for _ in range(random.choice((1, 1, 2, LONGEST_CHAT))):
            problem = draw(random, held_out=held_out)
            turns.append((problem.prompt, problem.answer))
        system = random.choice(style.systems) if style.systems and random.random() < 0.1 else ""
        yield _written(style, system, turns)


def _shard(work: Work, call: tuple[Split, int, int]) -> Shard:
    split, place, num_tokens = call
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    text = load_tokenizer(Path(work.tokenizer))
    ids = text.backend.token_to_id
    opened, closed = ids(work.style.assistant), ids(work.style.end)
    writer = ShardWriter(Path(work.folder), f"{split}-{place:05}", split, token_type_for(text.vocab_size))
    chats = _chats(work.style, Random(key(work.seed, split, place)), held_out=split == "validation")
    try:
        while writer.num_tokens < num_tokens:
            encoded = text.backend.encode_batch_fast(list(islice(chats, CHATS_AT_ONCE)), add_special_tokens=False)
            lengths = np.array([len(each) for each in encoded])
            tokens = np.concatenate([each.ids for each in encoded])
            runs = np.stack([np.nonzero(tokens == opened)[0] + 1, np.nonzero(tokens == closed)[0] + 1], axis=1)
            writer.add_many(tokens, lengths, runs)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise
