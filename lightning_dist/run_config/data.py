"""What is read."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config import DataConfig
from lightning_dist.errors import CombinationError
from lightning_dist.run_config.checks import check_choice, check_number

DATA_KINDS = ("synthetic", "naive", "sharded")


@dataclass(frozen=True)
class ShardedDataConfig(DataConfig):
    """Token shards, streamed; options of the library's own :class:`~lightning_dist.config.DataConfig`, and the text.

    Attributes:
        kind: ``sharded``.
        seed: Of the order; the run's own seed is added.
        url: Folder of token shards, as a path or URL: ``train/`` in it, and ``val/`` if there is validation. ``None``
            makes them of ``path``, once a host, in the run's folder.
        path: A text file, or a folder whose files are read; ``None`` means the documentation that ships with Python.
        seq_len: Tokens a sequence; ``None`` means the model's ``block_size``.
        val_fraction: Part of the text, from its end, kept for validation (0 to 0.5); with ``url``, 0 leaves ``val/``
            alone.
    """

    kind: str = "sharded"
    url: str | None = None
    path: str | None = None
    seq_len: int | None = None
    val_fraction: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("data.kind", self.kind, ("sharded",))
        if self.seq_len is not None:
            check_number("data.seq_len", self.seq_len, low=1, whole=True)
        check_number("data.val_fraction", self.val_fraction, low=0, high=0.5)
        if self.url is not None and self.path is not None:
            raise CombinationError(
                f"data.url={self.url} has shards already, and data.path={self.path} is text to make some of: give one"
            )


@dataclass(frozen=True)
class TextDataConfig:
    """Text as a plain data set of bytes.

    Attributes:
        kind: ``naive``: every rank reads everything, and Lightning injects its distributed sampler.
        path: A text file, or a folder whose files are read; ``None`` means the documentation that ships with Python.
        batch_size: Sequences a rank and micro-batch.
        seq_len: Bytes a sequence; ``None`` means the model's ``block_size``.
        val_fraction: Part of the text, from its end, kept for validation (0 to 0.5).
        workers: Loader processes a rank; 0 reads in the training process.
    """

    kind: str = "naive"
    path: str | None = None
    batch_size: int = 4
    seq_len: int | None = None
    val_fraction: float = 0.1
    workers: int = 0

    def __post_init__(self) -> None:
        check_choice("data.kind", self.kind, ("naive",))
        check_number("data.batch_size", self.batch_size, low=1, whole=True)
        if self.seq_len is not None:
            check_number("data.seq_len", self.seq_len, low=1, whole=True)
        check_number("data.val_fraction", self.val_fraction, low=0, high=0.5)
        check_number("data.workers", self.workers, low=0, whole=True)


@dataclass(frozen=True)
class SyntheticDataConfig:
    """Random samples made in memory, in the shape the model takes.

    Attributes:
        kind: ``synthetic``.
        num_samples: Training samples an epoch, over all ranks.
        num_val_samples: Validation samples, over all ranks.
        batch_size: Samples a rank and micro-batch.
        seq_len: Tokens a sequence (GPT only); ``None`` means the model's ``block_size``.
        workers: Loader processes a rank; 0 makes samples in the training process.
    """

    kind: str = "synthetic"
    num_samples: int = 4096
    num_val_samples: int = 128
    batch_size: int = 4
    seq_len: int | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        check_choice("data.kind", self.kind, ("synthetic",))
        check_number("data.num_samples", self.num_samples, low=1, whole=True)
        check_number("data.num_val_samples", self.num_val_samples, low=0, whole=True)
        check_number("data.batch_size", self.batch_size, low=1, whole=True)
        if self.seq_len is not None:
            check_number("data.seq_len", self.seq_len, low=1, whole=True)
        check_number("data.workers", self.workers, low=0, whole=True)
