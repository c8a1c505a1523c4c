"""The same samples in each library's own format, by its own writer.

A sample is 1024 tokens in int32. The first is the sample's number, so that a reader can tell what it was given.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.peers import import_streaming

SEQ_LEN = 1024
SAMPLE_BYTES = 4 * SEQ_LEN
VOCABULARY = 50257
SHARD_SAMPLES = 16384  # of ours, 64 MB; chunks of them are what is fetched
Tokens = NDArray[np.int32]


def make_tokens(folder: Path, num_samples: int) -> None:
    """One array in one file, which the others are made from."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (num_samples, SEQ_LEN), dtype=np.int32)
    tokens[:, 0] = np.arange(num_samples)
    np.save(folder / "tokens.npy", tokens)


def open_tokens(folder: Path) -> Tokens:
    """(samples, 1024), mapped."""
    found: Tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    return found


def _mapped(tokens: Tokens, folder: Path, chunk_bytes: int) -> None:
    np.save(folder / "tokens.npy", tokens)


def _files(tokens: Tokens, folder: Path, chunk_bytes: int) -> None:
    for number, chunk in enumerate(_cut(tokens, chunk_bytes)):
        chunk.tofile(folder / f"{number:05d}.bin")


def _hierdist(tokens: Tokens, folder: Path, chunk_bytes: int) -> None:
    from lightning_dist.cli import main

    flat = tokens.reshape(-1)
    size = SHARD_SAMPLES * SEQ_LEN
    for number, start in enumerate(range(0, len(flat), size)):
        shard = flat[start : start + size + 1]  # a sample predicts 1024 tokens, and has one more
        if start + size >= len(flat):
            shard = np.append(shard, np.int32(0))
        shard.tofile(folder / f"{number:05d}.bin")
    command = ["data", "index", str(folder), "--format", "tokens", "--dtype", "int32", "--seq-len", str(SEQ_LEN)]
    status = main([*command, "--chunk-size", str(chunk_bytes)])
    if status:
        raise RuntimeError(f"hierdist {' '.join(command)} ended with {status}")


def _litdata(tokens: Tokens, folder: Path, chunk_bytes: int) -> None:
    import litdata

    starts = list(range(0, len(tokens), 1024))
    litdata.optimize(
        fn=_LitDataSamples(tokens.filename),  # type: ignore[attr-defined]  # of an array that is a mapped file
        inputs=starts,
        output_dir=str(folder),
        chunk_size=chunk_bytes // 4,  # with this item loader it is counted in tokens
        item_loader=litdata.TokensLoader(block_size=SEQ_LEN),
        num_workers=1,
        start_method="fork",
        reorder_files=False,
        verbose=False,
    )


class _LitDataSamples:
    """Samples from a first one on, as tensors without a header."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, start: int) -> Any:
        import torch

        tokens: Tokens = np.load(self._path, mmap_mode="r")
        for sample in tokens[start : start + 1024]:
            yield torch.from_numpy(np.array(sample))


def _mds(tokens: Tokens, folder: Path, chunk_bytes: int) -> None:
    streaming = import_streaming()
    columns = {"tokens": f"ndarray:int32:{SEQ_LEN}"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=chunk_bytes) as writer:
        for sample in tokens:
            writer.write({"tokens": np.array(sample)})


def _tar(tokens: Tokens, folder: Path, chunk_bytes: int) -> None:
    import webdataset

    pattern = str(folder / "%05d.tar")
    with webdataset.ShardWriter(pattern, maxcount=chunk_bytes // SAMPLE_BYTES, verbose=0) as writer:
        for number, sample in enumerate(tokens):
            writer.write({"__key__": f"{number:08d}", "bin": sample.tobytes()})


FORMATS: dict[str, Callable[[Tokens, Path, int], None]] = {
    "mapped": _mapped,
    "files": _files,
    "hierdist": _hierdist,
    "litdata": _litdata,
    "mds": _mds,
    "tar": _tar,
}


def make(format_name: str, tokens: Tokens, folder: Path, chunk_bytes: int) -> int:
    """Write a data set; its bytes, on disk when this returns.

    Args:
        format_name: Key of :data:`FORMATS`.
        tokens: (samples, 1024).
        folder: A new one.
        chunk_bytes: Size of the files, or parts of files, that are fetched at once.
    """
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the writers' own
        FORMATS[format_name](tokens, folder, chunk_bytes)
    size_bytes = 0
    for path in folder.rglob("*"):
        if path.is_file():
            size_bytes += path.stat().st_size
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    return size_bytes


def forget(folder: Path) -> None:
    """Take a data set out of the kernel's page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _cut(tokens: Tokens, chunk_bytes: int) -> list[Tokens]:
    size = max(1, chunk_bytes // SAMPLE_BYTES)
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]
