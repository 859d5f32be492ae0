"""Training batches as a pure function of the shards, the seed and the sample numbers.

A resumed run needs only a sample number, and sample n is the same row at any world size. Knows no text, no model and no ranks.
"""

from __future__ import annotations

from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.core.recipe.sections import DataSection, DataSource
from windlass.errors import BadInput
from windlass.tasks.train.data.order import Interleaving, key, permute, quotas_of
from windlass.tasks.train.data.rows import PackedRows, RowArrays, gather
from windlass.tasks.train.data.shards import ShardManifest, Split, open_shards, read_manifest


class PackedBatch(NamedTuple):
    """Rows of packed documents, [rows, length] each."""

    tokens: Tensor
    """int64."""
    targets: Tensor
    """int64: the next token of the same document; -100 if there is none, or if it is masked."""
    positions: Tensor
    """int64: position in the document."""
    documents: Tensor
    """int32: index of the document in its row. Attention stays within a document."""


class Batches:
    def __init__(
        self, sources: list[PackedRows], weights: list[float] | None, manifests: list[ShardManifest], section: DataSection
    ) -> None:
        self._sources = sources
        self._seed = section.seed
        self._filler = manifests[0].end_token
        self._interleaving = Interleaving(quotas_of([len(rows) for rows in sources], weights))
        self.sequence_length = sources[0].length
        self.vocab_size = manifests[0].vocab_size
        self.tokenizer = manifests[0].tokenizer
        """SHA-256 of the tokenizer that made the tokens."""
        self.num_samples_per_epoch = self._interleaving.period
        """The rows of all sources; without weights each is read once per epoch."""
        self.num_tokens = sum(shard.shard.num_tokens for rows in sources for shard in rows.shards)
        shards = [shard for rows in sources for shard in rows.shards]
        self.unchecked = tuple(dict.fromkeys(shard.folder for shard in shards if not shard.has_checksums))
        """Folders of shards without checksums of blocks."""
        self.fingerprint = _fingerprint(manifests, weights, section)
        """Digest of everything that the samples depend on."""

    def batch(self, first_sample: int, count: int) -> PackedBatch:
        """Samples first_sample, first_sample + 1, ...; numbers continue over epochs."""
        if first_sample < 0 or count < 1:
            raise ValueError(f"samples {first_sample} to {first_sample + count}")
        sources, draws = self._interleaving.draws(first_sample, count)
        shape = (count, self.sequence_length)
        tokens, targets, positions = (np.empty(shape, np.int64) for _ in range(3))
        found = RowArrays(tokens, targets, positions, np.empty(shape, np.int32))
        for source in np.unique(sources).tolist():
            chosen = np.nonzero(sources == source)[0]
            self._fill(found, chosen, source, self._shuffled(source, draws[chosen]))
        return PackedBatch(*map(torch.from_numpy, found))

    def _shuffled(self, source: int, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each draw: every epoch of a source has its own permutation."""
        size = len(self._sources[source])
        numbers = np.empty_like(draws)
        epochs, places = np.divmod(draws, size)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            numbers[chosen] = permute(places[chosen].astype(np.uint64), size, key(self._seed, source, epoch)).astype(np.int64)
        return numbers

    def _fill(self, found: RowArrays, into: NDArray[np.int64], source: int, numbers: NDArray[np.int64]) -> None:
        rows = self._sources[source]
        shards, starts, stops = rows.locate(numbers)
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            made = gather(rows.shards[shard], starts[chosen], stops[chosen], rows.length, self._filler)
            for target, values in zip(found, made, strict=True):
                target[into[chosen]] = values


def open_batches(section: DataSection, base: Path, split: Split = "train", vocab_size: int | None = None) -> Batches:
    """`base`: the recipe's folder, which source paths are relative to. `vocab_size`: the model's, if it is larger than the tokenizer's."""
    if not section.sources:
        raise BadInput('the recipe has no data: add token shards made by `windlass train data` as [[data.sources]] path = "..."')
    if section.sequence_length is None:
        raise BadInput("data.sequence_length is missing: set the tokens per row")
    weights = _weights(section.sources)
    folders = [base / Path(source.path).expanduser() for source in section.sources]
    manifests = [read_manifest(folder) for folder in folders]
    _check_alike(folders, manifests)
    opened: list[tuple[PackedRows, ShardManifest, float | None]] = []
    for place, (folder, manifest) in enumerate(zip(folders, manifests, strict=True)):
        rows = PackedRows(open_shards(folder, manifest, split, vocab_size), section.sequence_length, section.packing)
        if len(rows):
            opened.append((rows, manifest, weights[place] if weights else None))
        elif split == "train":
            raise BadInput(f"every shard of {folder} is shorter than one row of {section.sequence_length} tokens")
    if not opened:
        raise BadInput(
            f"no source has a held out row of {section.sequence_length} tokens for validation; "
            "prepare the data with --validation 0.01 or more"
        )
    kept = [weight for _, _, weight in opened if weight is not None]
    return Batches([rows for rows, _, _ in opened], kept or None, [manifest for _, manifest, _ in opened], section)


def _weights(sources: tuple[DataSource, ...]) -> list[float] | None:
    given = [source.weight for source in sources if source.weight is not None]
    if not given:
        return None
    if len(given) < len(sources):
        without = next(source.path for source in sources if source.weight is None)
        raise BadInput(f"data.sources: {without} has no weight but others do; set weights for all sources or for none")
    for source in sources:
        if source.weight is None or not isfinite(source.weight) or source.weight <= 0:
            raise BadInput(f"data.sources: the weight of {source.path} is {source.weight}; it must be a positive finite number")
    return given


def _check_alike(folders: list[Path], manifests: list[ShardManifest]) -> None:
    for folder, manifest in zip(folders, manifests, strict=True):
        if manifest.tokenizer != manifests[0].tokenizer:
            raise BadInput(f"{folders[0]} and {folder} were prepared with different tokenizers; use the same one")


def _fingerprint(manifests: list[ShardManifest], weights: list[float] | None, section: DataSection) -> str:
    parts = [*(manifest.fingerprint for manifest in manifests), weights, section.sequence_length, section.packing, section.seed]
    return sha256("/".join(map(str, parts)).encode()).hexdigest()
