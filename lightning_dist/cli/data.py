"""``hierdist data``: token shards from text, indexes, what a data set holds, and whether it is whole."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lightning_dist.cli.command import Command
from lightning_dist.cli.data_tables import of_dataset
from lightning_dist.cli.storage_options import add_storage_options, storage_options
from lightning_dist.config.checks import parse_bytes
from lightning_dist.data.formats import FORMATS, Surveyed, make_format
from lightning_dist.data.formats.detection import detect_format
from lightning_dist.data.formats.tokens import CHUNK_BYTES, DTYPES
from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.index.index_file import (
    INDEX_NAME,
    PACKED_NAME,
    IndexElsewhere,
    index_bytes,
    is_index,
    read_json,
)
from lightning_dist.data.index.verification import verify
from lightning_dist.data.reading import ReadFolder
from lightning_dist.data.storage.output import open_write_folder
from lightning_dist.data.storage.shards import open_read_folder
from lightning_dist.data.writing.encoders import BYTES
from lightning_dist.data.writing.token_writer import TokenSettings, write_tokens
from lightning_dist.errors import ConfigError, ForeignDataError

_READ = [name for name in FORMATS if name != "mapped"]  # that one is an object of a program


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    _add_write(actions.add_parser("write", help="Write token shards from text, in parallel; start again to resume."))
    index = actions.add_parser("index", help="Write the index of files that do not say how many samples they hold.")
    _add_url(index)
    index.add_argument("--out", metavar="FOLDER", help="where to write it, if not beside the data: a path or a URL")
    index.add_argument("--seq-len", type=int, metavar="N", help="tokens a sample predicts, or a packed row has")
    index.add_argument("--dtype", choices=sorted(DTYPES), help="type of the tokens in .bin files")
    index.add_argument("--eos", type=int, metavar="TOKEN", help="the token that ends documents, for packing")
    index.add_argument("--chunk-size", default=CHUNK_BYTES, metavar="SIZE", help="fetched at once (default: 4MiB)")
    _add_workers(index)
    info = actions.add_parser("info", help="Show what a data set holds.")
    _add_url(info)
    info.add_argument("--index", metavar="FOLDER", help="where its index is, if not beside the data")
    check = actions.add_parser("verify", help="Read all bytes and compare checksums; exit status 1 if any differ.")
    _add_url(check)
    check.add_argument("--index", metavar="FOLDER", help="where its index is, if not beside the data")
    _add_workers(check)


def _add_write(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="text files, or folders of them; a file is a document")
    parser.add_argument("--out", required=True, metavar="URL", help="a new folder: a path or a URL (s3://, gs://, ...)")
    parser.add_argument("--seq-len", type=int, required=True, metavar="N", help="tokens that a sample predicts")
    parser.add_argument("--tokenizer", default=BYTES, help="bytes (the default), or the path of a tokenizer.json")
    parser.add_argument(
        "--eos",
        nargs="?",
        const=True,
        metavar="TOKEN",
        help="end each document with this token, or with the tokenizer's usual one; packing needs it",
    )
    parser.add_argument("--shard-size", default="256MB", metavar="SIZE", help="text a shard (default: 256MB)")
    parser.add_argument("--chunk-size", default=CHUNK_BYTES, metavar="SIZE", help="fetched at once (default: 4MiB)")
    _add_workers(parser)
    add_storage_options(parser)


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="a folder of data: a path or a URL (s3://, gs://, ...)")
    parser.add_argument("--format", choices=_READ, metavar="NAME", help=f"one of {', '.join(_READ)}; else found out")
    add_storage_options(parser)


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads (default: cores)"
    )


def _run(arguments: argparse.Namespace) -> int:
    if getattr(arguments, "workers", 1) < 1:
        raise ConfigError(f"--workers {arguments.workers}: must be at least 1")
    return _ACTIONS[arguments.action](arguments)


def _write(arguments: argparse.Namespace) -> int:
    settings = TokenSettings(
        seq_len=arguments.seq_len,
        tokenizer=arguments.tokenizer,
        eos=arguments.eos,
        shard_size=arguments.shard_size,
        chunk_size=arguments.chunk_size,
    )
    with _bar("encoding") as bar:
        written = write_tokens(
            arguments.texts,
            out=arguments.out,
            settings=settings,
            workers=arguments.workers,
            storage_options=storage_options(arguments),
            begin=bar.begin,
            progress=bar.advance,
        )
    print(f"{written.shards_written} shards written, {written.shards_kept} were finished before")
    _print_indexes(arguments.out, *filter(None, (written.index, written.packed)))
    return 0


def _index(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments.url, arguments)
    name = arguments.format or detect_format(folder)
    options = {"seq_len": arguments.seq_len, "dtype": arguments.dtype, "eos": arguments.eos}
    if name in ("tokens", "packed", "jsonl"):
        options["chunk_bytes"] = parse_bytes("--chunk-size", arguments.chunk_size)
    reader = make_format(name, **options)
    if not isinstance(reader, Surveyed):
        raise ConfigError(f"{folder.url} is of the format {name}, which has an index of its own: nothing is to be done")
    target, file = arguments.out or arguments.url, PACKED_NAME if name == "packed" else INDEX_NAME
    _refuse_foreign(target, file, arguments)
    with _bar("reading") as bar:
        bar.begin(sum(folder.sizes().values()))
        index = reader.survey(folder, workers=arguments.workers, progress=bar.advance)
    open_write_folder(target, storage_options=storage_options(arguments)).write(file, index_bytes(index))
    print(f"{target.rstrip('/')}/{file} written")
    _print_indexes(arguments.url, index)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    folder = _indexed_folder(arguments)
    _print_indexes(folder.url, *_indexes(folder, arguments))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    folder = _indexed_folder(arguments)
    indexes = _indexes(folder, arguments)
    with _bar("reading") as bar:
        bar.begin(sum(index.size_bytes for index in indexes))
        found = [list(verify(folder, i, workers=arguments.workers, progress=bar.advance)) for i in indexes]
    for index, damages in zip(indexes, found, strict=True):
        for damage in damages:
            print(damage.reason, file=sys.stderr)
        state = "as indexed" if index.crc32 is not None else "all there; the index has no checksums"
        if damages:
            state = f"{len(damages)} of {index.num_chunks} chunks damaged"
        print(f"{folder.url} ({index.format}): {state}")
    return int(any(found))


def _indexes(folder: ReadFolder, arguments: argparse.Namespace) -> list[DatasetIndex]:
    """That of the format asked for; else all there are of the folder."""
    name = arguments.format or detect_format(folder)
    indexes = [make_format(name).index(folder)]
    if arguments.format is None and name == "tokens" and folder.read(PACKED_NAME) is not None:
        indexes.append(make_format("packed").index(folder))
    return indexes


def _refuse_foreign(target: str, file: str, arguments: argparse.Namespace) -> None:
    """Leave the ``index.json`` of another library alone, and that which was written with its shards."""
    found = read_json(_folder(target, arguments), file)
    if found is None:
        return
    path = f"{target.rstrip('/')}/{file}"
    if not is_index(found):
        raise ForeignDataError(f"{path} is another library's: give another folder by --out")
    if file == INDEX_NAME and "tokenizer" in (found.get("properties") or {}):
        raise ConfigError(
            f"{path} was written with its shards, and knows their tokenizer, which they do not: give another folder by "
            "--out; for samples of another length only, read them with TokensFormat(seq_len=...)"
        )


def _indexed_folder(arguments: argparse.Namespace) -> ReadFolder:
    folder = _folder(arguments.url, arguments)
    return folder if arguments.index is None else IndexElsewhere(folder, _folder(arguments.index, arguments))


def _folder(url: str, arguments: argparse.Namespace) -> ReadFolder:
    return open_read_folder(url, storage_options=storage_options(arguments))


def _print_indexes(url: str, *indexes: DatasetIndex) -> None:
    # A file or a pipe has no width to keep to, and a table cut at 80 columns is no use.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(of_dataset(url, indexes))


class _Bar:
    """Progress in bytes."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None)

    def begin(self, size_bytes: int) -> None:
        """So many are to be done."""
        self._progress.update(self._task, total=size_bytes)

    def advance(self, size_bytes: int) -> None:
        """So many more are done."""
        self._progress.advance(self._task, size_bytes)


@contextmanager
def _bar(title: str) -> Iterator[_Bar]:
    """A bar on a terminal; nothing elsewhere, where it would be noise in a log."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        yield _Bar(progress, title)


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "write": _write,
    "index": _index,
    "info": _info,
    "verify": _verify,
}

DATA = Command("Write token shards from text; index, show and verify data sets.", _add_arguments, _run)
