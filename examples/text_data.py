"""The data of the examples: text as bytes, read whole or by rank, and random samples.

By default the text is English that every Python ships: the reference of the language (``pydoc_data.topics``) and the
docstrings of the standard library.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
import re
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_dist.errors import ConfigError
from lightning_dist.run_config import GPTConfig, MLPConfig, SyntheticDataConfig, TextDataConfig

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


class ExampleData(pl.LightningDataModule):
    """Training and validation loaders.

    - ``sharded``: a rank reads its own part of the training text only, and goes through it in an order of its own.
    - ``naive``: every rank opens all text; Lightning injects its distributed sampler.
    - ``synthetic``: random samples; Lightning injects its distributed sampler.

    Args:
        data: What to read.
        model: Says how long sequences may be, or how wide vectors are.
        seed: Of the order of samples.
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
        if self._text is None:
            return
        wanted = world_size * self.data.batch_size * self.seq_len + 1
        train, val = self._split()
        if train < wanted or (self.has_validation and val < self.seq_len + 1):
            raise ConfigError(
                f"the text has {self._text.size} bytes, {train} for training and {val} for validation; "
                f"{world_size} ranks need at least {wanted} for training and {self.seq_len + 1} for validation: "
                "give more text by data.path, or lower data.batch_size or data.seq_len"
            )

    def train_dataloader(self) -> DataLoader[Sample]:
        if self.data.kind != "sharded":
            return self._loader(self._whole("train"), shuffle=True)
        assert self._text is not None
        world_size, rank = self._place()
        train, _ = self._split()
        per_rank = (train - 1) // self.seq_len // world_size * self.seq_len
        dataset = Windows(self._text.read(rank * per_rank, (rank + 1) * per_rank + 1), self.seq_len)
        # A DistributedSampler, which Lightning leaves alone and tells the epoch; of one replica, the part being ours.
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=self.seed)
        return self._loader(dataset, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Sample]:
        dataset = self._whole("val")
        if self.data.kind != "sharded":
            return self._loader(dataset)
        world_size, rank = self._place()
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)  # type: ignore[arg-type]
        return self._loader(dataset, sampler=sampler)

    def _place(self) -> tuple[int, int]:
        if self.trainer is None:
            return 1, 0
        part = self.trainer.distributed_sampler_kwargs  # ranks that share layers read the same
        assert part is not None, "the strategy is a parallel one"
        return part["num_replicas"], part["rank"]

    def _split(self) -> tuple[int, int]:
        """Bytes for training and for validation."""
        assert self._text is not None
        assert isinstance(self.data, TextDataConfig)
        val = int(self._text.size * self.data.val_fraction)
        return self._text.size - val, val

    def _whole(self, stage: str) -> Dataset[Sample]:
        if isinstance(self.data, SyntheticDataConfig):
            count = self.data.num_samples if stage == "train" else self.data.num_val_samples
            seed = 2 * self.seed + (stage == "val")
            return RandomSamples(self.model, num_samples=count, seq_len=self.seq_len, seed=seed)
        assert self._text is not None
        train, _ = self._split()
        start, stop = (0, train) if stage == "train" else (train, self._text.size)
        return Windows(self._text.read(start, stop), self.seq_len)

    def _loader(
        self, dataset: Dataset[Sample], *, shuffle: bool = False, sampler: DistributedSampler[Sample] | None = None
    ) -> DataLoader[Sample]:
        return DataLoader(
            dataset,
            batch_size=self.data.batch_size,
            shuffle=shuffle,
            sampler=sampler,
            num_workers=self.data.workers,
            persistent_workers=self.data.workers > 0,
            pin_memory=torch.cuda.is_available(),
            drop_last=shuffle or (sampler is not None and sampler.shuffle),
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
