"""How training data are streamed."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config.checks import MIB, check_choice, check_count, check_flags, check_range, parse_bytes
from lightning_dist.errors import CombinationError

EPOCHS = ("exact", "endless")
LAST_BATCHES = ("drop", "pad", "short")
READERS = ("threads", "processes")
ON_UNREADABLE = ("error", "skip")


@dataclass(frozen=True)
class DataConfig:
    """How training data are streamed.

    Attributes:
        batch_size: Samples a rank and micro-batch; of a replica, where ranks share a model.
        shuffle: Whether training samples come in an order that follows the seed and the epoch, or as files have them.
        seed: Of the order.
        lanes: Places of the data that a batch is taken from in turn. Another number is another order. Hosts read
            disjoint shards where the number of ranks, or of equal hosts, divides it.
        shuffle_block: Chunks of a lane that together have about so many samples, and one at least, are shuffled as one;
            more mixes better, and needs more chunks at a time.
        epoch: ``exact`` (each sample once an epoch) or ``endless`` (batches go across the ends of epochs).
        last_batch: What becomes of samples at the end of an exact epoch that fill no batch of all ranks: ``drop``,
            ``pad`` (samples of its start are taken again) or ``short`` (the last batches are smaller).
        workers: Threads or processes a rank that read and decode ahead; 0 reads when a batch is asked for.
        readers: ``threads`` or ``processes`` (for decoding that holds Python's lock).
        prefetch: Batches that a worker has ready, or in work, at a time.
        persistent: Let workers live, and read ahead, across the ends of epochs.
        pin_memory: Put batches into pinned memory, with CUDA.
        on_unreadable: What a shard that cannot be read does: ``error``, or ``skip`` (others take the place of its
            samples; they are counted).
        cache_dir: Folder of this host in which its ranks keep what they fetch from shared storage; ``None`` means the
            user's cache folder. Local data are read where they are.
        cache_limit: What that folder may hold, in bytes, as a number or with a unit.
        fetch_threads: Threads a rank that fetch chunks from shared storage before they are needed.
        fetch_ahead: How much a rank fetches ahead, in bytes, as a number or with a unit.
        decoded_limit: What a rank may hold in memory of compressed files, and of rows of Parquet, that it has decoded,
            in bytes, as a number or with a unit; beyond it they are decoded again. ``None`` means a sixteenth of the
            memory of the host, or of the container.
        timeout_s: How long a batch may take before the run ends with an error, in seconds.
    """

    batch_size: int = 4
    shuffle: bool = True
    seed: int = 0
    lanes: int = 24
    shuffle_block: int = 1024
    epoch: str = "exact"
    last_batch: str = "drop"
    workers: int = 0
    readers: str = "threads"
    prefetch: int = 2
    persistent: bool = False
    pin_memory: bool = False
    on_unreadable: str = "error"
    cache_dir: str | None = None
    cache_limit: int | str = "16GB"
    fetch_threads: int = 2
    fetch_ahead: int | str = "256MB"
    decoded_limit: int | str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_flags("data", self)
        check_count("data.batch_size", self.batch_size, low=1, unit="samples")
        check_count("data.seed", self.seed, low=0, high=2**63 - 1, unit="(a seed)")
        check_count("data.lanes", self.lanes, low=1, high=65536, unit="lanes")
        check_count("data.shuffle_block", self.shuffle_block, low=1, unit="samples")
        check_choice("data.epoch", self.epoch, EPOCHS)
        check_choice("data.last_batch", self.last_batch, LAST_BATCHES)
        check_count("data.workers", self.workers, low=0, unit="workers")
        check_choice("data.readers", self.readers, READERS)
        check_count("data.prefetch", self.prefetch, low=1, unit="batches")
        check_choice("data.on_unreadable", self.on_unreadable, ON_UNREADABLE)
        check_range("data.cache_limit", self.cache_limit_bytes, low=MIB, unit="bytes")
        check_count("data.fetch_threads", self.fetch_threads, low=0, unit="threads")
        check_range("data.fetch_ahead", self.fetch_ahead_bytes, low=0, unit="bytes")
        if self.decoded_limit_bytes is not None:
            check_range("data.decoded_limit", self.decoded_limit_bytes, low=MIB, unit="bytes")
        check_range("data.timeout_s", self.timeout_s, low=0.1, unit="seconds")
        if self.persistent and not self.workers:
            raise CombinationError(
                "data.persistent=true with data.workers=0: write data.workers=2, or persistent=false"
            )

    @property
    def cache_limit_bytes(self) -> int:
        """What the cache may hold."""
        return parse_bytes("data.cache_limit", self.cache_limit)

    @property
    def fetch_ahead_bytes(self) -> int:
        """How much is fetched ahead."""
        return parse_bytes("data.fetch_ahead", self.fetch_ahead)

    @property
    def decoded_limit_bytes(self) -> int | None:
        """What may be decoded at a time; ``None``: as the memory that there is says."""
        return None if self.decoded_limit is None else parse_bytes("data.decoded_limit", self.decoded_limit)
