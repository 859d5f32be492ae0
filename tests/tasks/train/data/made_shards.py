"""Token shards made by hand, of documents that tests know."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from windlass.errors import DoesNotFit, UnknownName
from windlass.tasks.train.data.prepare.processes import report_progress
from windlass.tasks.train.data.prepare.write_shards import Run, TokenShardWriter, write_manifest
from windlass.tasks.train.data.shards import ShardManifest, Split

Document = tuple[Sequence[int], Sequence[Run] | None]


def make_shards(
    folder: Path,
    shards: Sequence[Sequence[Document]],
    *,
    vocab_size: int = 1 << 20,
    splits: Sequence[Split] | None = None,
    tokenizer: str = "same",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for place, documents in enumerate(shards):
        split: Split = splits[place] if splits else "train"
        writer = TokenShardWriter(folder, f"{split}-{place:05}", split, "uint32")
        for tokens, learned in documents:
            writer.add(tokens, learned)
        made.append(writer.finish())
    write_manifest(
        folder, ShardManifest(tokenizer=tokenizer, vocab_size=vocab_size, end_token=0, token_type="uint32", shards=tuple(made))
    )
    return folder


def numbered(lengths: Sequence[int], first: int = 1) -> list[Document]:
    """Documents of these lengths whose tokens are all different."""
    documents: list[Document] = []
    for length in lengths:
        documents.append((range(first, first + length), None))
        first += length
    return documents


# --- work for other processes, which find it by its name


def double(number: int) -> int:
    report_progress(1)
    return 2 * number


def fill_the_disk(number: int) -> int:
    raise DoesNotFit("the disk is full", 123)


def refuse(number: int) -> int:
    raise UnknownName("number", str(number), ["12", "13"])


def vanish(number: int) -> int:
    os._exit(9)
