"""Processes one work unit: reads its documents, checks them, tokenizes them and writes shards. Runs in a worker process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import write_atomically
from windlass.model.text.chat.assistant_spans import Span
from windlass.tasks.train.data.prepare.documents import BadRecord, Document, line_number, read_documents
from windlass.tasks.train.data.prepare.encoding import Encoded, Encoder
from windlass.tasks.train.data.prepare.inputs import WorkUnit
from windlass.tasks.train.data.prepare.near_duplicates import hashed_words, signatures, text_hash
from windlass.tasks.train.data.prepare.plain_text import too_many_controls
from windlass.tasks.train.data.prepare.processes import report_progress
from windlass.tasks.train.data.prepare.quality import QualityCounts
from windlass.tasks.train.data.prepare.write_shards import TokenShardWriter, token_type_for
from windlass.tasks.train.data.shards import Split, TokenShard, TokenType

DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 512, 1 << 20


class PrepareSettings(Frozen):
    tokenizer: str
    """A model's folder or file."""
    template: str | None = None
    """A chat template, instead of the tokenizer's."""
    field: str | None = None
    validation: float = 0.0
    """Fraction of documents held out, chosen by a hash of the text, so that duplicates are in the same split."""
    longest: int = 1 << 17
    """In tokens; longer documents are reported, but kept."""
    skip_bad: bool = False
    """Count unreadable records instead of stopping."""


class UnitResult(msgspec.Struct):
    """The result of a work unit."""

    shards: list[TokenShard]
    counts: QualityCounts


class _Rendered(NamedTuple):
    """A document ready for tokenization."""

    place: str
    text: str
    spans: list[Span] | None
    """None: not a chat."""
    contents: str = ""
    """The messages of a chat, without the template's text."""


_open: dict[str, UnitWork] = {}
_loaded: list[Encoder] = []
"""Already loaded in this process: some tokenizers take seconds."""


def open_encoder(settings: PrepareSettings) -> Encoder:
    _loaded[:] = [Encoder(Path(settings.tokenizer), settings.template)]
    return _loaded[0]


def open_work(settings: PrepareSettings, out: Path | None, signed: Path) -> None:
    """In every process, before its first unit."""
    _open["work"] = UnitWork(settings, _loaded.pop() if _loaded else open_encoder(settings), out, signed)


def run_unit(unit: WorkUnit) -> UnitResult:
    return _open["work"].run(unit)


class UnitWork:
    def __init__(self, settings: PrepareSettings, encoder: Encoder, out: Path | None, signed: Path) -> None:
        """Without `out` only the report is made. `signed`: directory for signatures."""
        self._settings, self._encoder, self._out, self._signed = settings, encoder, out, signed

    def run(self, unit: WorkUnit) -> UnitResult:
        writers = _SplitWriters(self._out, unit.number, self._encoder.vocab_size)
        counts = QualityCounts(lengths={}, examples={})
        signed: list[NDArray[np.uint64]] = []
        try:
            for batch in self._batches(unit, counts):
                hashes = [text_hash(document.text) for document in batch]
                encoded = self._encode(batch)
                for document, hashed, tokens in zip(batch, hashes, encoded, strict=True):
                    self._count(counts, document, tokens)
                    held_out = hashed < self._settings.validation * 2**64
                    writers.add("validation" if held_out else "train", tokens)
                signed.append(signatures(hashes, [_compared(*pair) for pair in zip(batch, encoded, strict=True)]))
            write_atomically(signature_file(self._signed, unit), np.concatenate(signed).tobytes() if signed else b"")
            return UnitResult(shards=writers.finish(), counts=counts)
        except BaseException:
            writers.abandon()
            raise

    def _batches(self, unit: WorkUnit, counts: QualityCounts) -> Iterator[list[_Rendered]]:
        batch: list[_Rendered] = []
        characters = 0
        for piece in unit.pieces:
            reported, share = 0, 0
            for found in read_documents(piece, self._settings.field):
                document = self._readable(found, counts)
                if document is None:
                    continue
                batch.append(document)
                characters += len(document.text)
                share += len(document.text)
                if len(batch) >= DOCUMENTS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
                    yield batch
                    batch, characters = [], 0
                    reported += _report(min(share, piece.num_bytes) - reported)
            _report(piece.num_bytes - reported)
        if batch:
            yield batch

    def _readable(self, found: Document | BadRecord, counts: QualityCounts) -> _Rendered | None:
        rendered = self._rendered(found) if isinstance(found, Document) else found
        if isinstance(rendered, _Rendered) and (why := too_many_controls(rendered.text)) is not None:
            rendered = BadRecord(rendered.place, why)
        if isinstance(rendered, BadRecord):
            if not self._settings.skip_bad:
                raise BadInput(f"{_with_line(rendered.place)}: {rendered.why}")
            counts.bad += 1
            counts.note("bad", f"{_with_line(rendered.place)}: {rendered.why}")
            return None
        if not rendered.text.strip():
            counts.empty += 1
            counts.note("empty", rendered.place)
            return None
        counts.look_at(rendered.text, rendered.place)
        return rendered

    def _rendered(self, document: Document) -> _Rendered | BadRecord:
        if document.messages is None:
            return _Rendered(document.place, document.text, None)
        if not document.messages:
            return _Rendered(document.place, "", None)
        try:
            return _Rendered(document.place, *self._encoder.chat_text(document), contents=_contents(document.messages))
        except BadInput as error:
            if error.field != "messages":  # not caused by this chat
                raise
            return BadRecord(document.place, str(error))

    def _encode(self, batch: list[_Rendered]) -> list[Encoded]:
        texts = [document.text for document in batch if document.spans is None]
        chats = [(document.text, document.spans) for document in batch if document.spans is not None]
        from_texts, from_chats = iter(self._encoder.texts(texts)), iter(self._encoder.chats(chats))
        return [next(from_texts if document.spans is None else from_chats) for document in batch]

    def _count(self, counts: QualityCounts, document: _Rendered, encoded: Encoded) -> None:
        num_tokens = len(encoded.tokens)
        num_learned = num_tokens if encoded.learned is None else sum(end - begin for begin, end in encoded.learned)
        counts.count(num_tokens, num_learned, document.spans is not None, self._settings.longest, document.place)


def signature_file(folder: Path, unit: WorkUnit) -> Path:
    return folder / f".signatures-{unit.number:05}"


def _contents(messages: list[dict[str, Any]]) -> str:
    return " ".join(content for message in messages if isinstance(content := message.get("content"), str))


def _compared(document: _Rendered, encoded: Encoded) -> NDArray[np.uint32]:
    """The tokens to compare for near duplicates."""
    return encoded.tokens if document.spans is None else hashed_words(document.contents)


def _report(num_bytes: int) -> int:
    report_progress(num_bytes)
    return num_bytes


def _with_line(place: str) -> str:
    """`file, byte 120` as `file, line 3`."""
    path, found, offset = place.rpartition(", byte ")
    return f"{path}, line {line_number(Path(path), int(offset))}" if found else place


class _SplitWriters:
    """One shard per split, created with its first document."""

    def __init__(self, folder: Path | None, number: int, vocab_size: int) -> None:
        self._folder, self._number = folder, number
        self._type: TokenType = token_type_for(vocab_size)
        self._writers: dict[Split, TokenShardWriter] = {}

    def add(self, split: Split, encoded: Encoded) -> None:
        if self._folder is None:
            return
        if split not in self._writers:
            self._writers[split] = TokenShardWriter(self._folder, f"{split}-{self._number:05}", split, self._type)
        self._writers[split].add(encoded.tokens, encoded.learned)

    def finish(self) -> list[TokenShard]:
        return [writer.finish() for writer in self._writers.values()]

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abandon()
