"""The data of the examples: text in token shards, text as bytes, and random samples.

By default the text is English that every Python ships: the reference of the language (``pydoc_data.topics``) and the
docstrings of the standard library.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dist import ShardedDataModule, Source
from lightning_dist.data.formats.tokens import TokensFormat
from lightning_dist.data.writing.token_writer import TokenSettings, write_tokens
from lightning_dist.errors import ConfigError, ForeignDataError
from lightning_dist.run_config import GPTConfig, MLPConfig, ShardedDataConfig, SyntheticDataConfig, TextDataConfig

Sample = tuple[Tensor, Tensor]


class Text:
    """Bytes of several files in a row; a part is read without reading the rest.

    Args:
        path: A file, or a folder whose files are taken in the order of their names (hidden ones are not); None means
            the text that ships with Python.
    """

    def __init__(self, path: str | None) -> None:
        self._documents: list[tuple[Path | bytes, int]]
        if path is None:
            text = python_documentation()
            self._documents = [(text, len(text))]
        else:
            self._documents = [(file, file.stat().st_size) for file in _files(Path(path).expanduser())]
        self.size = sum(size for _, size in self._documents)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` up to ``stop``."""
        parts, offset = [], 0
        for document, size in self._documents:
            first, last = max(start - offset, 0), min(stop - offset, size)
            offset += size
            if first >= last:
                continue
            if isinstance(document, bytes):
                parts.append(document[first:last])
            else:
                with document.open("rb") as file:
                    file.seek(first)
                    parts.append(file.read(last - first))
        return b"".join(parts)


@functools.cache
def python_documentation() -> bytes:
    """Text that every Python ships, in an order that is the same everywhere."""
    library = Path(sysconfig.get_path("stdlib"))
    docstring = re.compile(r'^ *[ru]?"""(.{80,}?)"""', re.DOTALL | re.MULTILINE)
    texts = []
    for file in sorted(library.glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        texts += [match[1].strip() for match in docstring.finditer(source)]
    topics = pydoc_data.topics.topics
    texts += [topics[name].strip() for name in sorted(topics)]
    return "\n\n".join(texts).encode()


class Windows(Dataset[Sample]):
    """Sequences cut from text without overlap: the bytes, and the same shifted by one as targets."""

    def __init__(self, text: bytes, seq_len: int) -> None:
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> Sample:
        start = index * self._seq_len
        tokens = self._tokens[start : start + self._seq_len + 1].long()
        return tokens[:-1], tokens[1:]


class RandomSamples(Dataset[Sample]):
    """Samples that follow from (seed, index): token sequences for a GPT, pairs of vectors for an MLP."""

    def __init__(self, model: GPTConfig | MLPConfig, *, num_samples: int, seq_len: int, seed: int) -> None:
        self._model = model
        self._num_samples = num_samples
        self._seq_len = seq_len
        self._seed = seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        if isinstance(self._model, GPTConfig):
            tokens = torch.randint(self._model.vocab_size, (self._seq_len + 1,), generator=generator)
            return tokens[:-1], tokens[1:]
        vector = torch.randn(self._model.n_features, generator=generator)
        return vector, vector.flip(0)


class StreamedText(ShardedDataModule):
    """Text in token shards, streamed: ``data=sharded``.

    Args:
        data: Where the shards are, or the text to make them of.
        model: Says how long sequences may be.
        folder: Of the run; shards are made here.
        seed: Of the run.
    """

    def __init__(self, data: ShardedDataConfig, model: GPTConfig, folder: Path, *, seed: int) -> None:
        self.data = data
        self.seq_len = data.seq_len or model.block_size
        self._text = Text(data.path) if data.url is None else None
        url = data.url.rstrip("/") if data.url is not None else str(folder / "text")
        self._urls = {"train": f"{url}/train"}
        if data.val_fraction > 0:
            self._urls["val"] = f"{url}/val"
        sources = {part: Source(place, format=TokensFormat(seq_len=self.seq_len)) for part, place in self._urls.items()}
        config = replace(data, seed=data.seed + seed)
        super().__init__(sources["train"], val=sources.get("val"), config=config, transform=inputs_and_targets)

    @property
    def has_validation(self) -> bool:
        """Whether anything is kept for validation."""
        return "val" in self._urls

    def check(self, world_size: int) -> None:
        """Refuse data too small for so many ranks; called before any process starts.

        Raises:
            ConfigError: A rank would not fill one batch.
            DataError: There are no shards.
        """
        if self._text is not None:
            check_size(self._text, self.data, self.seq_len, world_size, has_validation=self.has_validation)
            return
        for part, url in self._urls.items():
            try:
                samples = Source(url, format=TokensFormat(seq_len=self.seq_len)).index.num_samples
            except ForeignDataError as error:
                raise ForeignDataError(
                    f"{error}. data.url={self.data.url} is to have token shards in train/ and val/; "
                    "data.val_fraction=0 does without val/"
                ) from error
            wanted = world_size * (self.data.batch_size if part == "train" else 1)
            if samples < wanted:
                raise ConfigError(
                    f"{url} has {samples} sequences of {self.seq_len} tokens; {world_size} ranks need at least "
                    f"{wanted}: give more text, or lower data.batch_size or data.seq_len"
                )

    def prepare_data(self) -> None:
        """Make shards of the text, once a host; those that are there are left alone."""
        if self._text is None:
            return
        train, val = split(self._text, self.data)
        parts = {"train": self._text.read(0, train), "val": self._text.read(train, train + val)}
        settings = TokenSettings(seq_len=self.seq_len, shard_size="1MiB", chunk_size="64KiB")
        for part, url in self._urls.items():
            write_tokens([parts[part]], out=url, settings=settings, workers=1)


class ExampleData(pl.LightningDataModule):
    """Training and validation loaders of plain data sets; Lightning injects its distributed sampler.

    - ``naive``: every rank opens all text.
    - ``synthetic``: random samples.

    Args:
        data: What to read.
        model: Says how long sequences may be, or how wide vectors are.
        seed: Of random samples.
    """

    def __init__(self, data: TextDataConfig | SyntheticDataConfig, model: GPTConfig | MLPConfig, *, seed: int) -> None:
        super().__init__()
        self.data = data
        self.model = model
        self.seed = seed
        self.seq_len = data.seq_len or (model.block_size if isinstance(model, GPTConfig) else 1)
        self._text = Text(data.path) if isinstance(data, TextDataConfig) else None

    @property
    def has_validation(self) -> bool:
        """Whether anything is kept for validation."""
        if isinstance(self.data, TextDataConfig):
            return self.data.val_fraction > 0
        return self.data.num_val_samples > 0

    def check(self, world_size: int) -> None:
        """Refuse a text too small for so many ranks; called before any process starts.

        Raises:
            ConfigError: A rank would not fill one batch.
        """
        if self._text is not None and isinstance(self.data, TextDataConfig):
            check_size(self._text, self.data, self.seq_len, world_size, has_validation=self.has_validation)

    def train_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self._whole("train"), shuffle=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self._whole("val"))

    def _whole(self, stage: str) -> Dataset[Sample]:
        if isinstance(self.data, SyntheticDataConfig):
            count = self.data.num_samples if stage == "train" else self.data.num_val_samples
            seed = 2 * self.seed + (stage == "val")
            return RandomSamples(self.model, num_samples=count, seq_len=self.seq_len, seed=seed)
        assert self._text is not None
        train, _ = split(self._text, self.data)
        start, stop = (0, train) if stage == "train" else (train, self._text.size)
        return Windows(self._text.read(start, stop), self.seq_len)

    def _loader(self, dataset: Dataset[Sample], *, shuffle: bool = False) -> DataLoader[Sample]:
        return DataLoader(
            dataset,
            batch_size=self.data.batch_size,
            shuffle=shuffle,
            num_workers=self.data.workers,
            persistent_workers=self.data.workers > 0,
            pin_memory=torch.cuda.is_available(),
            drop_last=shuffle,
        )


def inputs_and_targets(tokens: Tensor) -> Sample:
    """(seq_len + 1,) -> two of (seq_len,): the tokens, and the same shifted by one."""
    return tokens[:-1], tokens[1:]


def split(text: Text, data: TextDataConfig | ShardedDataConfig) -> tuple[int, int]:
    """Bytes for training and for validation."""
    val = int(text.size * data.val_fraction)
    return text.size - val, val


def check_size(
    text: Text, data: TextDataConfig | ShardedDataConfig, seq_len: int, world_size: int, *, has_validation: bool
) -> None:
    """Refuse a text too small for so many ranks.

    Raises:
        ConfigError: A rank would not fill one batch.
    """
    wanted = world_size * data.batch_size * seq_len + 1
    wanted_val = (world_size if isinstance(data, ShardedDataConfig) else 1) * seq_len + 1
    train, val = split(text, data)
    if train < wanted or (has_validation and val < wanted_val):
        raise ConfigError(
            f"the text has {text.size} bytes, {train} for training and {val} for validation; "
            f"{world_size} ranks need at least {wanted} for training and {wanted_val} for validation: "
            "give more text by data.path, or lower data.batch_size or data.seq_len"
        )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"data.path={path} is neither a file nor a folder")
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise ConfigError(f"data.path={path} has no files in it")
    return files
