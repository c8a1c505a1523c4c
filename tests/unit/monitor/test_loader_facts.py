"""What is known of a training loader: whether ranks share the data set, and what of it each holds."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import lightning_dist.capture.loader_facts as loader_facts_module
from lightning_dist import ShardedLoader, TokenSettings, write_tokens
from lightning_dist.capture.loader_facts import facts_of, held_bytes, host_facts, loader_facts


class Numbers(Dataset[int]):
    """Holds nothing, and says how large its files are."""

    size_bytes = 800

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Rude(Dataset[int]):
    def __len__(self) -> int:
        raise RuntimeError("do not ask")


def test_a_distributed_sampler_shares_the_data_set() -> None:
    dataset = TensorDataset(torch.zeros(100, 2))
    sampler = DistributedSampler(dataset, num_replicas=4, rank=1)
    facts = facts_of(DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=0), num_parts=4)
    assert facts == {
        "loader": "DataLoader",
        "dataset": "TensorDataset",
        "sampler": "DistributedSampler",
        "is_sharded": True,
        "dataset_length": 100,
        "samples_per_epoch": 25,
        "dataset_bytes": None,
        "held_bytes": 800,
        "workers": 0,
        "batch_size": 5,
        "pin_memory": False,
    }


def test_each_rank_goes_through_all_of_it_without_one() -> None:
    facts = facts_of(DataLoader(Numbers(), shuffle=True), num_parts=2)
    assert facts["is_sharded"] is False
    assert facts["sampler"] == "RandomSampler"
    assert (facts["dataset_bytes"], facts["held_bytes"]) == (800, 0)
    assert facts_of(DataLoader(Numbers()), num_parts=1)["is_sharded"] is True


def test_a_part_that_all_ranks_may_go_through_is_not_called_shared() -> None:
    """80 of 100 samples, by a sampler that knows nothing of ranks: two ranks do not share them."""
    part = DataLoader(Numbers(), sampler=SubsetRandomSampler(range(80)))
    assert facts_of(part, num_parts=2)["is_sharded"] is None
    assert facts_of(DataLoader(Numbers(), sampler=SubsetRandomSampler(range(50))), num_parts=2)["is_sharded"] is True


def test_batches_of_a_batch_sampler_are_not_taken_for_samples() -> None:
    class Batches(Sampler[list[int]]):
        sampler: Any = None

        def __len__(self) -> int:
            return 25

        def __iter__(self) -> Any:
            return iter([[0, 1, 2, 3]] * 25)

    batches = Batches()
    facts = facts_of(DataLoader(Numbers(), batch_sampler=batches), num_parts=2)
    assert (facts["sampler"], facts["samples_per_epoch"], facts["is_sharded"]) == ("Batches", None, None)
    batches.sampler = batches
    assert facts_of(DataLoader(Numbers(), batch_sampler=batches), num_parts=2)["sampler"] == "Batches"


def test_what_reads_when_it_is_asked_is_not_asked() -> None:
    class Lazy(UserDict[int, bytes]):
        def __getitem__(self, key: int) -> bytes:
            raise AssertionError("this would be a file")

    class OnStorage(Numbers):
        def __init__(self) -> None:
            self.by_key = Lazy({1: b""})

    assert held_bytes(OnStorage()) == 0


def test_data_sets_around_each_other_without_end() -> None:
    class Endless(Numbers):
        def __getattr__(self, name: str) -> Any:
            if name == "dataset":
                return Endless()
            raise AttributeError(name)

    assert held_bytes(Endless()) == 0


def test_of_lists_in_lists_so_much_is_looked_at_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nested(Numbers):
        def __init__(self) -> None:
            self.rows = [[bytes([row, column]) for column in range(100)] for row in range(100)]

    assert held_bytes(Nested()) == 20_000
    monkeypatch.setattr(loader_facts_module, "_MOST_LOOKED_AT", 501)
    assert 0 < held_bytes(Nested()) < 4_000


@pytest.mark.parametrize("loader", [DataLoader(Stream()), iter([1, 2]), [1, 2]], ids=["iterable", "iterator", "list"])
def test_what_may_share_inside_is_unknown(loader: object) -> None:
    assert facts_of(loader, num_parts=2)["is_sharded"] is None


def test_held_bytes_of_wrapped_data_sets_count_once() -> None:
    tensors = TensorDataset(torch.zeros(10, dtype=torch.int64))
    assert held_bytes(Subset(tensors, [1, 2])) == 80
    assert held_bytes(ConcatDataset([tensors, tensors, Numbers()])) == 80


def test_long_lists_are_looked_at_in_part() -> None:
    class Many(Numbers):
        def __init__(self) -> None:
            self.items = [bytes([i % 256, 0]) for i in range(50_000)]

    assert held_bytes(Many()) == 100_000


def test_held_bytes_are_of_memory(tmp_path: Path) -> None:
    class Mixed(Numbers):
        def __init__(self) -> None:
            self.mapped = np.memmap(tmp_path / "file", dtype=np.int8, mode="w+", shape=(1000,))
            self.by_name = {"a": np.zeros(4, np.int8), "b": [b"12", bytearray(3)], "c": "text"}

    assert held_bytes(Mixed()) == 9


def test_our_loader_says_all(tmp_path: Path) -> None:
    write_tokens([b"a" * 4096], out=tmp_path, settings=TokenSettings(seq_len=16, chunk_size="1KiB"), workers=1)
    loader = ShardedLoader(str(tmp_path), config={"batch_size": 2})
    facts = facts_of(loader, num_parts=1)
    loader.close()
    assert facts["is_sharded"] is True
    assert facts["dataset_length"] == facts["samples_per_epoch"] == loader.share.order.num_samples > 200
    assert facts["dataset_bytes"] > 4000
    assert facts["held_bytes"] == 0


def test_facts_of_a_trainer_never_raise(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu", devices=1, max_steps=1)
    facts = loader_facts(trainer)
    assert facts == host_facts(), "there is no loader yet"
    trainer.fit_loop._combined_loader = type("Combined", (), {"flattened": [DataLoader(Rude(), sampler=[0])]})()
    assert loader_facts(trainer) == host_facts()


def test_host_facts_name_the_processor() -> None:
    facts = host_facts()
    assert facts["cpu_cores"] >= 1
    assert facts["cpu_model"] is None or facts["cpu_model"]
