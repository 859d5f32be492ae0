"""Generated tasks to token shards: chats of a few problems each, trained on the answers.

Shards are generated in parallel, and each depends only on the seed and its number. Chats are written by a format string instead of the
chat template, which would dominate the time; both are first checked to give the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.model.bundled.tasks import draw
from windlass.model.text.chat.template import chat_template, render_chat
from windlass.model.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from windlass.tasks.train.data.order import key
from windlass.tasks.train.data.prepare.processes import report_progress, run_parallel
from windlass.tasks.train.data.prepare.write_shards import TokenShardWriter, token_type_for, write_manifest
from windlass.tasks.train.data.shards import MANIFEST, ShardManifest, Split, TokenShard
from windlass.tasks.train.data.tokenizer import copy_tokenizer, tokenizer_fingerprint

SHARD_TOKENS = 1 << 22
VALIDATION_TOKENS = 1 << 18
CHATS_AT_ONCE = 2048
CHATS_CHECKED = 500
ASCII_PATTERN = r"'(?i:s|t|re|ve|m|ll|d)|(?:(?![\r\n])[\W_])?[^\W\d_]+|\d| ?(?:(?!\s)[\W_])+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LONGEST_CHAT = 4
"""Maximum problems per chat."""


class ChatStyle(Frozen):
    """The chat template's format."""

    start: str
    system: str
    user: str
    assistant: str
    end: str
    """Ends an answer."""
    systems: tuple[str, ...] = ()
    """System messages; every tenth chat begins with one."""


class GenerationSettings(Frozen):
    tokenizer: str
    """The folder."""
    folder: str
    style: ChatStyle
    seed: int


class ShardTask(Frozen):
    """One shard to generate."""

    work: GenerationSettings
    split: Split
    place: int
    num_tokens: int


def generate_tasks(
    tokenizer: Path,
    folder: Path,
    style: ChatStyle,
    *,
    num_tokens: int,
    seed: int = 0,
    jobs: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> ShardManifest:
    """About `num_tokens` for training, and one shard of held-out problems. Existing shards are overwritten."""
    text = load_tokenizer(tokenizer)
    _check_style(text, style)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    work = GenerationSettings(tokenizer=str(tokenizer), folder=str(folder), style=style, seed=seed)
    sizes = [min(SHARD_TOKENS, num_tokens - first) for first in range(0, num_tokens, SHARD_TOKENS)]
    held = min(VALIDATION_TOKENS, num_tokens // 20)
    calls = [ShardTask(work=work, split="validation", place=0, num_tokens=held)]
    calls += [ShardTask(work=work, split="train", place=place, num_tokens=size) for place, size in enumerate(sizes)]
    with closing(run_parallel(make_shard, calls, jobs=jobs, advance=advance)) as made:
        shards = [shard for _, shard in made]
    end = text.token_id(style.end)
    assert end is not None  # _check_style
    manifest = ShardManifest(
        tokenizer=tokenizer_fingerprint(tokenizer, text),
        vocab_size=text.vocab_size,
        end_token=end,
        token_type=token_type_for(text.vocab_size),
        shards=tuple(sorted(shards, key=lambda shard: shard.name)),
        sources=(f"generated tasks, seed {seed}",),
    )
    copy_tokenizer(tokenizer, text, folder)
    write_manifest(folder, manifest)
    return manifest


def _check_style(text: Tokenizer, style: ChatStyle) -> None:
    template = chat_template(text.config)
    if template is None:
        raise BadInput("this tokenizer has no chat template, which is needed to write chats")
    messages = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant", "user", "assistant")]
    written = _written(style, "SYSTEM", [("USER", "ASSISTANT")] * 2)
    if (rendered := render_chat(template, messages, add_generation_prompt=False)) != written:
        raise BadInput(f"the chat template writes {rendered!r}, but the chat style writes {written!r}")
    for mark in (style.assistant, style.end):
        if text.token_id(mark) is None:
            raise BadInput(f"{mark!r} is not a token of this tokenizer, so answers cannot be located")


def _written(style: ChatStyle, system: str, turns: list[tuple[str, str]]) -> str:
    head = f"{style.start}{style.system}{system}" if system else style.start
    return head + "".join(f"{style.user}{prompt}{style.assistant}{answer}{style.end}" for prompt, answer in turns)


def _chats(style: ChatStyle, random: Random, held_out: bool) -> Iterator[str]:
    while True:
        turns: list[tuple[str, str]] = []
        for _ in range(random.choice((1, 1, 2, LONGEST_CHAT))):
            problem = draw(random, held_out=held_out)
            turns.append((problem.prompt, problem.answer))
        system = random.choice(style.systems) if style.systems and random.random() < 0.1 else ""
        yield _written(style, system, turns)


def make_shard(call: ShardTask) -> TokenShard:
    work, split, place = call.work, call.split, call.place
    text = load_tokenizer(Path(work.tokenizer))
    encode = WordCacheEncoder(text)
    opened, closed = text.token_id(work.style.assistant), text.token_id(work.style.end)
    writer = TokenShardWriter(Path(work.folder), f"{split}-{place:05}", split, token_type_for(text.vocab_size))
    chats = _chats(work.style, Random(key(work.seed, split, place)), held_out=split == "validation")
    try:
        while writer.num_tokens < call.num_tokens:
            encoded = [encode(chat) for chat in islice(chats, CHATS_AT_ONCE)]
            tokens = np.array([token for each in encoded for token in each])
            runs = np.stack([np.nonzero(tokens == opened)[0] + 1, np.nonzero(tokens == closed)[0] + 1], axis=1)
            report_progress(len(tokens))
            writer.add_many(tokens, np.array([len(each) for each in encoded]), runs)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


class WordCacheEncoder:
    """Tokenizes word by word with a cache, six times as fast as the tokenizer: tasks have few different words.

    A word's tokens do not depend on its neighbours; words are those of `train_tokenizer.PATTERN`, for ASCII. The first chats are encoded
    both ways and compared.
    """

    def __init__(self, text: Tokenizer) -> None:
        self._text = text
        marks = sorted({token.content for token in text.backend.get_added_tokens_decoder().values()}, key=len, reverse=True)
        self._apart = re.compile(f"({'|'.join(map(re.escape, marks))})").split
        self._cut = re.compile(ASCII_PATTERN).findall
        self._known: dict[str, list[int]] = {}
        self._to_check = CHATS_CHECKED

    def __call__(self, chat: str) -> list[int]:
        tokens: list[int] = []
        for place, part in enumerate(self._apart(chat)):
            for word in (part,) if place % 2 else self._cut(part):
                known = self._known.get(word)
                if known is None:
                    known = self._known[word] = self._text.encode(word, special=False)
                tokens += known
        if self._to_check:
            self._to_check -= 1
            if tokens != self._text.encode(chat, special=False):
                raise BadInput(
                    "this tokenizer splits words differently from `train_tokenizer.PATTERN`; use one made by `train_vocabulary`"
                )
        return tokens
