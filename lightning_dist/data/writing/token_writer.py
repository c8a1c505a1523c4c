"""Token shards from texts: by several threads, the same whatever their number, and resumable.

What is in the folder while it is written, in this order::

    .written.json          what is being written from what; stays
    shard-000000.bin       tokens; several at a time, in any order
    .shard-000000.json     after the shard: it is finished, and where its chunks lie; removed at the end
    packed.json            the index of packed documents, if these end with a token of their own
    index.json             last: the data set is complete

Each file appears whole. A run that was ended at any moment is started again with the same arguments: finished shards
stay, the rest is written, and the result is that of one run. Encoding releases the interpreter's lock, so threads are
enough.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dist.config.checks import check_count, parse_bytes
from lightning_dist.data.formats.packed import packed_index, packed_pieces
from lightning_dist.data.formats.tokens import CHUNK_BYTES, DTYPES
from lightning_dist.data.formats.windows import cut_windows
from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.index.index_file import INDEX_NAME, PACKED_NAME, PLAN_NAME, index_bytes
from lightning_dist.data.index.survey import Piece, Progress, index_of
from lightning_dist.data.storage.output import WriteFolder, open_write_folder
from lightning_dist.data.writing.encoders import BYTES, Encoder, dtype_for, open_encoder
from lightning_dist.data.writing.texts import Block, Document, Text, deal, documents_of, read_block
from lightning_dist.errors import ConfigError, ForeignDataError


@dataclass(frozen=True)
class TokenSettings:
    """How texts become token shards.

    Attributes:
        seq_len: Tokens that a sample predicts.
        tokenizer: ``bytes``, or the path of a ``tokenizer.json``.
        eos: Whether a token of its own ends each document: its name, or true for the usual one. Needed for packing.
        shard_size: Text a shard, e.g. ``256MB``.
        chunk_size: Tokens that are fetched at once, e.g. ``4MiB``.
    """

    seq_len: int
    tokenizer: str = BYTES
    eos: str | bool | None = None
    shard_size: int | str = "256MB"
    chunk_size: int | str = CHUNK_BYTES

    def __post_init__(self) -> None:
        check_count("seq_len", self.seq_len, low=1, unit="tokens")
        for what in ("shard_size", "chunk_size"):
            if parse_bytes(what, getattr(self, what)) < 1:
                raise ConfigError(f"{what}={getattr(self, what)!r}: must be at least one byte, e.g. 4MiB")


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        index: Of the windows.
        packed: Of the packed documents; ``None`` if they do not end with a token of their own.
        shards_written: By this call.
        shards_kept: That were finished before.
    """

    index: DatasetIndex
    packed: DatasetIndex | None
    shards_written: int
    shards_kept: int


class _Record(NamedTuple):
    """A finished shard."""

    tokens: int
    windows: list[Piece]
    packed: list[Piece]


def write_tokens(
    texts: Sequence[Text],
    *,
    out: str | os.PathLike[str] | WriteFolder,
    settings: TokenSettings,
    workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    begin: Callable[[int], None] | None = None,
) -> Written:
    """Write token shards and their index.

    Args:
        texts: Files, folders, or documents themselves as bytes; a file is a document.
        out: A path, a URL, or an open folder; new, or left by a call with the same arguments that was ended.
        settings: How.
        workers: Threads; ``None``: one for each core.
        storage_options: For fsspec, if ``out`` is a URL.
        progress: Told how many bytes of text more are done; called from the threads.
        begin: Told once, before, how many bytes of text there are.

    Raises:
        ConfigError: The texts cannot be encoded or are too short, or the folder holds something else.
    """
    folder = open_write_folder(out, storage_options=storage_options) if isinstance(out, (str, os.PathLike)) else out
    encoder = open_encoder(settings.tokenizer, eos=settings.eos)
    documents = documents_of(texts)
    writer = _Writer(folder, encoder, settings, documents)
    if begin is not None:
        begin(sum(document.size_bytes for document in documents))
    with folder.alone():
        return _write_all(writer, workers or os.cpu_count() or 1, progress)


def _write_all(writer: _Writer, workers: int, progress: Progress | None) -> Written:
    shards = writer.shards()
    complete = writer.claim()
    if complete is not None:
        writer.tidy(shards)
        return replace(complete, shards_kept=len(shards))
    kept = writer.finished(shards)
    executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="hierdist-write")

    def one(name: str) -> _Record:
        blocks = shards[name]
        record = kept[name] if name in kept else writer.write_shard(name, blocks)
        if progress is not None:
            progress(sum(block.stop - block.start for block in blocks))
        return record

    try:
        records = dict(zip(shards, executor.map(one, shards), strict=True))
    finally:
        executor.shutdown(cancel_futures=True)
    index, packed = writer.commit(records)
    writer.tidy(shards)
    return Written(index, packed, len(shards) - len(kept), len(kept))


class _Writer:
    """Writes into one folder."""

    def __init__(
        self, folder: WriteFolder, encoder: Encoder, settings: TokenSettings, documents: list[Document]
    ) -> None:
        self._folder = folder
        self._encoder = encoder
        self._settings = settings
        self._documents = documents
        self._dtype = dtype_for(encoder.vocab_size)
        self._item = np.dtype(DTYPES[self._dtype]).itemsize
        self._chunk_bytes = parse_bytes("chunk_size", settings.chunk_size)

    def shards(self) -> dict[str, list[Block]]:
        """What goes into which shard."""
        sizes = [document.size_bytes for document in self._documents]
        dealt = deal(sizes, shard_bytes=parse_bytes("shard_size", self._settings.shard_size))
        return {_shard_name(number): blocks for number, blocks in enumerate(dealt)}

    def claim(self) -> Written | None:
        """Say what this folder is for; what it holds if it is complete already.

        Raises:
            ConfigError: It is for something else.
        """
        plan, found = self._plan(), self._json(PLAN_NAME)
        index = self._json(INDEX_NAME)
        if found is None and (index is not None or self._folder.names()):
            raise ConfigError(
                f"{self._folder.url} has files already, which were not written by this: choose a new --out"
            )
        if found is not None and found != plan:
            differing = [key for key in plan if not isinstance(found, dict) or found.get(key) != plan[key]]
            raise ConfigError(
                f"{self._folder.url} was {'written' if index is not None else 'begun'} from something else (differing: "
                f"{', '.join(differing)}): give the same arguments, remove it, or choose another --out"
            )
        if index is not None:
            packed = self._json(PACKED_NAME)
            return Written(
                DatasetIndex.from_json(index, self._at(INDEX_NAME)),
                None if packed is None else DatasetIndex.from_json(packed, self._at(PACKED_NAME)),
                0,
                0,
            )
        if found is None:
            self._folder.write(PLAN_NAME, json.dumps(plan, sort_keys=True).encode())
        return None

    def finished(self, names: Iterable[str]) -> dict[str, _Record]:
        """Shards that need not be written again."""
        there = set(self._folder.names())
        found = {name: self._json(_record_name(name)) for name in names if {name, _record_name(name)} <= there}
        return {name: _record(record) for name, record in found.items() if record is not None}

    def write_shard(self, name: str, blocks: list[Block]) -> _Record:
        """Encode and write one shard, then say that it is finished."""
        tokens = self._encode(blocks)
        pieces = [
            Piece(
                cut.first * self._item,
                cut.tokens * self._item,
                cut.windows,
                zlib.crc32(tokens[cut.first : cut.first + cut.tokens].data),
            )
            for cut in cut_windows(
                len(tokens), seq_len=self._settings.seq_len, chunk_tokens=self._chunk_bytes // self._item
            )
        ]
        eos, packed = self._encoder.eos, []
        if eos is not None:
            packed = packed_pieces(
                tokens, start=0, eos=eos, seq_len=self._settings.seq_len, chunk_bytes=self._chunk_bytes
            )
        record = _Record(len(tokens), pieces, packed)
        self._check_claim()
        self._folder.write(name, tokens.data.cast("B") if len(tokens) else b"")
        self._folder.write(_record_name(name), json.dumps(record._asdict()).encode())
        return record

    def commit(self, records: Mapping[str, _Record]) -> tuple[DatasetIndex, DatasetIndex | None]:
        """Write the indexes; that of the windows, whose presence says that all is complete, last."""
        tokens, seq_len = sum(record.tokens for record in records.values()), self._settings.seq_len
        properties = {
            "dtype": self._dtype,
            "seq_len": seq_len,
            "chunk_bytes": self._chunk_bytes,
            "tokens": tokens,
            "vocab_size": self._encoder.vocab_size,
            "tokenizer": self._encoder.name,
            "eos": self._encoder.eos,
            "shard_tokens": [record.tokens for record in records.values()],
        }
        index = index_of("tokens", {name: record.windows for name, record in records.items()}, properties)
        if index.num_samples == 0:
            raise ConfigError(
                f"the texts give {tokens} tokens, and no shard has the {seq_len + 1} of one sample: "
                "give more text, or lower --seq-len"
            )
        self._check_claim()
        packed = None
        if self._encoder.eos is not None:
            packed = packed_index(
                {name: record.packed for name, record in records.items()},
                dtype=self._dtype,
                seq_len=seq_len,
                eos=self._encoder.eos,
                chunk_bytes=self._chunk_bytes,
                tokens=tokens,
                vocab_size=self._encoder.vocab_size,
            )
            self._folder.write(PACKED_NAME, index_bytes(packed))
        self._folder.write(INDEX_NAME, index_bytes(index))
        return index, packed

    def _check_claim(self) -> None:
        """Nobody has claimed the folder since; at a URL no lock keeps others out.

        Raises:
            ConfigError: Somebody has, for something else.
        """
        if self._json(PLAN_NAME) != self._plan():
            raise ConfigError(
                f"{self._folder.url} is being written to by another process, from other texts or with other options: "
                "end one of them, remove the folder, and give each an --out of its own"
            )

    def tidy(self, names: Iterable[str]) -> None:
        """Remove what only a resumed run needs."""
        there = set(self._folder.names())
        for name in names:
            if _record_name(name) in there:
                self._folder.remove(_record_name(name))

    def _encode(self, blocks: list[Block]) -> NDArray[Any]:
        parts = []
        for block in blocks:
            document = self._documents[block.document]
            parts.append(self._encoder.encode(read_block(document, block), document.label).astype(DTYPES[self._dtype]))
            if self._encoder.eos is not None and block.stop == document.size_bytes:
                parts.append(np.asarray([self._encoder.eos], dtype=DTYPES[self._dtype]))
        return np.concatenate(parts)

    def _plan(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        for document in self._documents:
            stamp = zlib.crc32(document.source) if isinstance(document.source, bytes) else document.changed_ns
            digest.update(json.dumps([document.name, document.size_bytes, stamp]).encode())
        return {
            "kind": "lightning_dist.written",
            "version": 1,
            "seq_len": self._settings.seq_len,
            "shard_bytes": parse_bytes("shard_size", self._settings.shard_size),
            "chunk_bytes": self._chunk_bytes,
            "tokenizer": self._encoder.name,
            "eos": self._encoder.eos,
            "documents": len(self._documents),
            "text_bytes": sum(document.size_bytes for document in self._documents),
            "texts": digest.hexdigest(),
        }

    def _json(self, name: str) -> Any:
        found = self._folder.read(name)
        try:
            return None if found is None else json.loads(found)
        except ValueError as error:
            raise ForeignDataError(
                f"{self._at(name)} is not JSON: {error}; remove it, or choose another --out"
            ) from error

    def _at(self, name: str) -> str:
        return f"{self._folder.url.rstrip('/')}/{name}"


def _shard_name(number: int) -> str:
    return f"shard-{number:06d}.bin"


def _record_name(shard: str) -> str:
    return f".{shard.removesuffix('.bin')}.json"


def _record(found: Mapping[str, Any]) -> _Record:
    windows, packed = ([Piece(*piece) for piece in found[key]] for key in ("windows", "packed"))
    return _Record(int(found["tokens"]), windows, packed)
