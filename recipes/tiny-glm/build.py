"""Builds the training data of the bundled model: its tokenizer, and token shards of generated tasks, text and chats.

    python recipes/tiny-glm/build.py out/tiny-glm

Needs Python, numpy, tokenizers, jinja2 and msgspec; no network. The tasks depend on the seed; the text is this installation's standard
library, so it differs slightly between Python versions. Existing output is kept; delete the folder to start over.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from gather import chats, standard_library, texts  # noqa: E402

from windlass.errors import Error  # noqa: E402
from windlass.model.bundled.tasks import problems  # noqa: E402
from windlass.tasks.train.data.prepare.generated import ChatStyle, generate_tasks  # noqa: E402
from windlass.tasks.train.data.prepare.prepare import prepare  # noqa: E402
from windlass.tasks.train.data.prepare.train_tokenizer import train_vocabulary, write_tokenizer  # noqa: E402
from windlass.tasks.train.data.prepare.unit import PrepareSettings  # noqa: E402
from windlass.tasks.train.data.shards import MANIFEST, read_manifest  # noqa: E402
from windlass.units import parse_count  # noqa: E402

VOCABULARY, CONTEXT = 4096, 512
END, SYSTEM, USER, ASSISTANT, OBSERVATION = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
SPECIAL = (END, "[gMASK]", "<sop>", SYSTEM, USER, ASSISTANT, OBSERVATION)
"""GLM's chat tokens."""
STYLE = ChatStyle(
    start="[gMASK]<sop>",
    system=SYSTEM,
    user=USER,
    assistant=ASSISTANT,
    end=END,
    systems=("You are a helpful assistant.", "Answer briefly.", "You are a calculator."),
)
TASKS_FOR_VOCABULARY = 40_000


NOTICE = """tiny-glm learned from tasks that Windlass generates and from the standard library of Python %s.
The latter is Copyright (c) 2001 Python Software Foundation; All Rights Reserved, under the PSF License Agreement
(https://docs.python.org/3/license.html).
"""


def make_tokenizer(folder: Path, size: int, seed: int) -> None:
    def sample() -> Iterator[str]:
        yield from texts()
        # Prompts only: answers are random letters and numbers, without words worth a token.
        yield from (problem.prompt for problem in islice(problems(seed, 0, TASKS_FOR_VOCABULARY), TASKS_FOR_VOCABULARY))

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "NOTICE").write_text(NOTICE % platform.python_version(), encoding="utf-8")
    template = (HERE / "chat_template.jinja").read_text(encoding="utf-8").strip()
    write_tokenizer(folder, train_vocabulary(sample(), size, SPECIAL, END), template, END, (END, USER, OBSERVATION), CONTEXT)


def write_sources(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("text", ({"text": text} for text in texts())), ("chats", ({"messages": chat} for chat in chats()))):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def build(out: Path, vocabulary: int, num_tokens: int, seed: int, jobs: int) -> None:
    tokenizer, sources = out / "tokenizer", out / "sources"
    if not (tokenizer / "generation_config.json").exists():
        _timed("tokenizer", lambda: make_tokenizer(tokenizer, vocabulary, seed))
    if not (out / "tasks" / MANIFEST).exists():
        _timed("tasks", lambda: generate_tasks(tokenizer, out / "tasks", STYLE, num_tokens=num_tokens, seed=seed, jobs=jobs))
    if not all((sources / f"{name}.jsonl").exists() for name in ("text", "chats")):
        _timed(f"sources from {standard_library()}", lambda: write_sources(sources))
    for name, held in (("text", 0.01), ("chats", 0.0)):
        if not (out / name / MANIFEST).exists():
            settings = PrepareSettings(tokenizer=str(tokenizer), validation=held)
            _timed(
                name,
                lambda name=name, settings=settings: prepare([str(sources / f"{name}.jsonl")], out / name, settings, jobs=jobs),
            )
    for name in ("tasks", "text", "chats"):
        shards = read_manifest(out / name).shards
        print(
            f"{name}: {sum(shard.num_tokens for shard in shards):,} tokens, {sum(shard.num_learned for shard in shards):,} learned, "
            f"{sum(shard.num_documents for shard in shards):,} documents, "
            f"{sum(shard.num_tokens for shard in shards if shard.split == 'validation'):,} tokens held out"
        )


def _timed(what: str, make: Callable[[], object]) -> None:
    begun = perf_counter()
    make()
    print(f"{what}: {perf_counter() - begun:.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokenizer and token shards of tiny-glm.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", default="64M", help="of generated tasks; 64M")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"entries of the tokenizer; {VOCABULARY}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 is one per core")
    given = parser.parse_args()
    try:
        build(given.out, given.vocabulary, parse_count(given.tokens), given.seed, given.jobs)
    except Error as error:
        print(f"build.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
