"""The text of the examples: what is read, by whom."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.text_data import ExampleData, RandomSamples, StreamedText, Text, Windows, python_documentation
from lightning_dist.data.writing.token_writer import TokenSettings, write_tokens
from lightning_dist.errors import ConfigError, DataError
from lightning_dist.run_config import GPTConfig, MLPConfig, ShardedDataConfig, TextDataConfig

GPT = GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=8)


class FakeTrainer(SimpleNamespace):
    """What data modules ask of one; unlike its base it can be referred to weakly."""


def test_the_default_text_is_english_and_the_same_each_time() -> None:
    text = python_documentation()
    assert len(text) > 500_000
    assert b"The " in text
    python_documentation.cache_clear()
    assert python_documentation() == text


def test_parts_are_read_across_files_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"4567")
    (tmp_path / "a").write_bytes(b"0123")
    (tmp_path / ".hidden").write_bytes(b"no")
    text = Text(str(tmp_path))
    assert text.size == 8
    assert text.read(0, 8) == b"01234567"
    assert text.read(3, 5) == b"34"
    assert text.read(5, 100) == b"567"


def test_windows_are_the_bytes_and_what_follows() -> None:
    windows = Windows(b"abcdefg", 3)
    assert len(windows) == 2
    inputs, targets = windows[1]
    assert bytes(inputs.tolist()) == b"def"
    assert bytes(targets.tolist()) == b"efg"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_streamed_ranks_read_parts_of_their_own_of_one_length(world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(250)))
    seen: list[set[int]] = []
    for rank in range(world_size):
        config = ShardedDataConfig(path=str(path), batch_size=1, val_fraction=0.2)
        data = StreamedText(config, GPT, tmp_path / "run", seed=0)
        data.prepare_data()
        data.trainer = FakeTrainer(  # type: ignore[assignment]
            distributed_sampler_kwargs={"num_replicas": world_size, "rank": rank},
            num_nodes=1,
            current_epoch=0,
            callbacks=[],
            overfit_batches=0,
            fit_loop=SimpleNamespace(_data_fetcher=None),
        )
        batches = list(data.train_dataloader())
        assert len(batches) == 199 // 8 // world_size
        assert all(torch.equal(inputs[:, 1:], targets[:, :-1]) for inputs, targets in batches)
        seen.append({int(value) for inputs, _ in batches for value in inputs.flatten()})
        data.teardown("fit")
    assert sum(len(part) for part in seen) == len(set().union(*seen))
    assert max(set().union(*seen)) < 200  # the rest is for validation


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 100)
    plain = ExampleData(TextDataConfig(path=str(path), batch_size=4), GPT, seed=0)
    streamed = StreamedText(ShardedDataConfig(path=str(path), batch_size=4), GPT, tmp_path, seed=0)
    for data in (plain, streamed):
        data.check(1)
        with pytest.raises(ConfigError, match="4 ranks need at least 129 for training"):
            data.check(4)


def test_shards_that_are_not_there_or_too_few_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"x" * 100)
    config = ShardedDataConfig(url=str(tmp_path / "shards"), batch_size=4, val_fraction=0.0)
    data = StreamedText(config, GPT, tmp_path, seed=0)
    write_tokens([text], out=tmp_path / "shards", settings=TokenSettings(seq_len=8))  # one level too high
    with pytest.raises(DataError, match=r"hierdist data(.|\n)*shards is to have token shards in train/ and val/"):
        data.check(1)
    write_tokens([text], out=tmp_path / "shards" / "train", settings=TokenSettings(seq_len=8))
    data = StreamedText(config, GPT, tmp_path, seed=0)
    data.check(3)
    with pytest.raises(ConfigError, match="12 sequences of 8 tokens; 4 ranks need at least 16"):
        data.check(4)


def test_random_samples_follow_from_their_number() -> None:
    one, other = (RandomSamples(MLPConfig(n_features=4), num_samples=3, seq_len=1, seed=5) for _ in range(2))
    assert torch.equal(one[2][0], other[2][0])
    assert not torch.equal(one[1][0], one[2][0])
