"""What is compared. Each arm opens its own format and gives, an epoch, batches (samples, 1024 or 1025) in int64.

That is what a language model takes, so every arm converts; each shuffles in the way its library recommends, and reads
its library's own cache of a host.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.data.formats import SEQ_LEN, open_tokens
from benchmarks.data.peers import import_streaming, missing

Batches = Callable[[int], Iterator[torch.Tensor]]
"""Of an epoch, by its number."""


@dataclass(frozen=True)
class Place:
    """Where one rank reads.

    Attributes:
        folder: The data set, in the arm's format: on this machine's disk.
        url: The same in shared storage, by HTTP; ``None``: it is to be read from the folder.
        s3_url: The same by S3.
        cache: Folder of this rank's host; empty before the first epoch.
        batch_size: Samples a batch.
        rank: Of all.
        host_of: By rank.
    """

    folder: Path
    url: str | None
    s3_url: str | None
    cache: Path
    batch_size: int
    rank: int
    host_of: tuple[int, ...]


class Arm(NamedTuple):
    """One of those that are compared.

    Attributes:
        open: Opens the data set on this rank.
        data: Which format it reads; a key of :data:`benchmarks.data.formats.FORMATS`.
        package: What has to be installed.
        local: Whether it reads from disk.
        remote: Whether it reads from shared storage.
    """

    open: Callable[[Place], Batches]
    data: str
    package: str = "torch"
    local: bool = True
    remote: bool = True

    @property
    def is_missing(self) -> bool:
        """Whether its package is not installed."""
        return missing(self.package)


def _hierdist(place: Place, workers: int, readers: str = "threads") -> Batches:
    from lightning_dist.config import DataConfig
    from lightning_dist.data.loading.loader import ShardedLoader
    from lightning_dist.data.order.replicas import Replicas

    config = DataConfig(
        batch_size=place.batch_size, workers=workers, readers=readers, cache_dir=str(place.cache), last_batch="short"
    )
    loader = ShardedLoader(place.s3_url or str(place.folder), config=config)
    loader.place(Replicas(place.host_of, place.rank))
    return lambda epoch: iter(loader)


def _litdata(place: Place, workers: int) -> Batches:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"  # the store has no TLS; there is no option for that
    loader = litdata.StreamingDataLoader(
        litdata.StreamingDataset(
            place.s3_url or str(place.folder),
            cache_dir=str(place.cache) if place.s3_url else None,
            item_loader=litdata.TokensLoader(block_size=SEQ_LEN),
            shuffle=True,
            drop_last=False,
        ),
        batch_size=place.batch_size,
        num_workers=workers,
    )
    return lambda epoch: (batch.long() for batch in loader)


def _streaming(place: Place, workers: int) -> Batches:
    streaming = import_streaming()
    dataset = streaming.StreamingDataset(
        remote=place.s3_url,
        local=str(place.cache if place.s3_url else place.folder),
        shuffle=True,
        batch_size=place.batch_size,
    )
    loader = streaming.StreamingDataLoader(dataset, batch_size=place.batch_size, num_workers=workers)
    return lambda epoch: (batch["tokens"].long() for batch in loader)


def _webdataset(place: Place, workers: int) -> Batches:
    import webdataset

    names = sorted(path.name for path in place.folder.glob("*.tar"))
    dataset = (
        webdataset.WebDataset(
            [f"{place.url or place.folder}/{name}" for name in names],
            shardshuffle=len(names),
            nodesplitter=webdataset.split_by_node,
            cache_dir=str(place.cache) if place.url else None,
            seed=0,
        )
        .shuffle(1000)
        .map(_tokens_of_tar)
        .batched(place.batch_size, collation_fn=_stacked)
    )
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=workers)
    return lambda epoch: (batch.long() for batch in loader)


def _tokens_of_tar(sample: dict[str, Any]) -> Any:
    return np.frombuffer(sample["bin"], dtype=np.int32)


def _stacked(samples: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(samples))


class _Mapped(Dataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self._tokens = open_tokens(folder)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[index].astype(np.int64))


def _mapped(place: Place, workers: int) -> Batches:
    dataset = _Mapped(place.folder)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=len(place.host_of), rank=place.rank)
    loader = DataLoader(dataset, batch_size=place.batch_size, sampler=sampler, num_workers=workers)

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        sampler.set_epoch(epoch)
        return iter(loader)

    return batches


class _Files(IterableDataset[torch.Tensor]):
    """Reads all files, as a data set does that nobody told how many ranks there are."""

    def __init__(self, place: Place) -> None:
        self._url = place.url
        self._names = sorted(path.name for path in place.folder.glob("*.bin"))

    def __iter__(self) -> Iterator[torch.Tensor]:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for name in self._names:
            with direct.open(f"{self._url}/{name}", timeout=60) as answer:
                tokens = np.frombuffer(answer.read(), dtype=np.int32).reshape(-1, SEQ_LEN)
            yield from torch.from_numpy(tokens.astype(np.int64))


def _naive(place: Place) -> Batches:
    loader = DataLoader(_Files(place), batch_size=place.batch_size)
    return lambda epoch: iter(loader)


WORKERS = 2

ARMS: dict[str, Arm] = {
    "hierdist": Arm(partial(_hierdist, workers=0), "hierdist"),
    "hierdist threads": Arm(partial(_hierdist, workers=WORKERS), "hierdist"),
    "hierdist processes": Arm(partial(_hierdist, workers=WORKERS, readers="processes"), "hierdist"),
    "litdata": Arm(partial(_litdata, workers=0), "litdata", "litdata"),
    "litdata workers": Arm(partial(_litdata, workers=WORKERS), "litdata", "litdata"),
    "streaming": Arm(partial(_streaming, workers=0), "mds", "streaming"),
    "streaming workers": Arm(partial(_streaming, workers=WORKERS), "mds", "streaming"),
    "webdataset": Arm(partial(_webdataset, workers=0), "tar", "webdataset"),
    "webdataset workers": Arm(partial(_webdataset, workers=WORKERS), "tar", "webdataset"),
    "mapped": Arm(partial(_mapped, workers=0), "mapped", remote=False),
    "mapped workers": Arm(partial(_mapped, workers=WORKERS), "mapped", remote=False),
    "naive": Arm(_naive, "files", local=False),
}
