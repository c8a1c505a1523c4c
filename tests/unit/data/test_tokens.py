"""Token shards: which tokens are in which sample, whatever the chunks, the type and the file."""

import struct
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats.tokens import DTYPES, TokensFormat
from lightning_dist.data.formats.windows import cut_windows, num_windows
from lightning_dist.data.index.index_file import index_bytes
from lightning_dist.errors import ConfigError, ForeignDataError, UnreadableShardError
from tests.support.folders import PathFolder, all_samples, open_chunk, place_of


@given(tokens=st.integers(0, 400), seq_len=st.integers(1, 20), chunk_tokens=st.integers(1, 100))
def test_cuts_cover_each_window_once(tokens: int, seq_len: int, chunk_tokens: int) -> None:
    cuts = cut_windows(tokens, seq_len=seq_len, chunk_tokens=chunk_tokens)
    starts = [cut.first + window * seq_len for cut in cuts for window in range(cut.windows)]
    assert starts == [window * seq_len for window in range(num_windows(tokens, seq_len))]
    for cut in cuts:
        assert cut.tokens == cut.windows * seq_len + 1
        assert cut.first + cut.tokens <= tokens
        assert cut.tokens <= chunk_tokens or cut.windows == 1
    assert tokens - 1 - num_windows(tokens, seq_len) * seq_len < seq_len


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ending", ["bin", "npy"])
def test_samples_are_windows_of_each_shard(dtype: str, ending: str, tmp_path: Path) -> None:
    shards = [np.arange(start, start + size).astype(DTYPES[dtype]) for start, size in ((0, 100), (100, 7), (120, 66))]
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    cache.mkdir()
    for number, shard in enumerate(shards):
        path = data / f"{number}.{ending}"
        shard.tofile(path) if ending == "bin" else np.save(path, shard)
    index = TokensFormat(seq_len=8, dtype=dtype, chunk_bytes=200).survey(PathFolder(data), workers=2)
    (data / "index.json").write_bytes(index_bytes(index))
    found = TokensFormat().index(PathFolder(data))
    assert found.fingerprint == index.fingerprint
    expected = [shard[at : at + 9].tolist() for shard in shards for at in range(0, len(shard) - 8, 8)]
    for place in (None, cache):
        samples = all_samples(TokensFormat(), data, found, cache=place)
        assert [sample.tolist() for sample in samples] == expected
        assert {sample.dtype for sample in samples} == {torch.int64}
    assert index.num_samples == len(expected)


def test_other_length_is_cut_without_reading_shards(tmp_path: Path) -> None:
    np.arange(1000, dtype="<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", np.arange(1000, 1500, dtype="<u2"))
    index = TokensFormat(seq_len=16, dtype="uint16", chunk_bytes=256).survey(PathFolder(tmp_path))
    (tmp_path / "index.json").write_bytes(index_bytes(index))
    folder = PathFolder(tmp_path)
    recut = TokensFormat(seq_len=50).index(folder)
    assert not folder.bytes_read
    assert recut.crc32 is None
    direct = TokensFormat(seq_len=50, dtype="uint16", chunk_bytes=256).survey(PathFolder(tmp_path))
    assert (recut.starts == direct.starts).all()
    assert (recut.samples == direct.samples).all()
    assert recut.properties == direct.properties
    assert TokensFormat(seq_len=16).index(folder).fingerprint == index.fingerprint


def test_samples_do_not_share_memory_with_the_file(tmp_path: Path) -> None:
    np.arange(100, dtype="<i8").tofile(tmp_path / "a.bin")
    index = TokensFormat(seq_len=9, dtype="int64").survey(PathFolder(tmp_path))
    opened = open_chunk(TokensFormat(), tmp_path, index, 0)
    sample = opened.sample(1)
    sample += 1
    assert opened.sample(1).tolist() == list(range(9, 19))
    (tmp_path / "a.bin").unlink()  # as a cache does
    assert opened.sample(2).tolist() == list(range(18, 28))
    with pytest.raises(IndexError):
        opened.sample(11)
    with pytest.raises(IndexError):
        opened.sample(-1)


def test_cut_off_shard_is_an_error_not_a_crash(tmp_path: Path) -> None:
    np.arange(5000, dtype="<u4").tofile(tmp_path / "a.bin")
    index = TokensFormat(seq_len=100, dtype="uint32").survey(PathFolder(tmp_path))
    (tmp_path / "a.bin").write_bytes(b"\0" * 4000)
    with pytest.raises(UnreadableShardError, match=r"a.bin.*cut off"):
        TokensFormat().open(place_of(tmp_path, index.chunk(0)), index.chunk(0), index.properties, Decoded())
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UnreadableShardError, match="cannot be read"):
        TokensFormat().open(place_of(tmp_path, index.chunk(0)), index.chunk(0), index.properties, Decoded())


def test_chunk_that_is_smaller_than_its_samples_is_refused(tmp_path: Path) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "a.bin")
    index = TokensFormat(seq_len=10, dtype="uint16").survey(PathFolder(tmp_path))
    chunk = index.chunk(0)._replace(size_bytes=100)
    with pytest.raises(UnreadableShardError, match="has 50 tokens"):
        TokensFormat().open(place_of(tmp_path, chunk), chunk, index.properties, Decoded())


def test_no_index_says_what_to_run(tmp_path: Path) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(ForeignDataError, match=r"hierdist data index .* --format tokens"):
        TokensFormat().index(PathFolder(tmp_path))
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(ForeignDataError, match="is not JSON"):
        TokensFormat().index(PathFolder(tmp_path))


def test_files_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    folder = PathFolder(tmp_path)
    with pytest.raises(ForeignDataError, match=r"no files of the format tokens.*\.bin"):
        TokensFormat(seq_len=8, dtype="uint16").survey(folder)
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(UnreadableShardError, match="no whole number of uint16"):
        TokensFormat(seq_len=8, dtype="uint16").survey(folder)
    with pytest.raises(ConfigError, match="--dtype uint16"):
        TokensFormat(seq_len=8).survey(folder)
    with pytest.raises(ConfigError, match="--seq-len"):
        TokensFormat(dtype="uint8").survey(folder)
    (tmp_path / "a.bin").unlink()
    for array in (np.zeros((3, 3), dtype="<u2"), np.zeros(9, dtype=">u2"), np.zeros(9, dtype="<f4")):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ForeignDataError, match="one-dimensional"):
            TokensFormat(seq_len=2).survey(folder)
    np.save(tmp_path / "a.npy", np.asarray([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(ForeignDataError, match=r"array of \|O of 1 dim"):
        TokensFormat(seq_len=2).survey(folder)
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", 20) + b"__import__('os')    \n")
    with pytest.raises(UnreadableShardError, match="header cannot be read"):
        TokensFormat(seq_len=2).survey(folder)
    np.save(tmp_path / "a.npy", np.zeros(9, dtype="<u2"))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-2])
    with pytest.raises(UnreadableShardError, match="should have 9 tokens"):
        TokensFormat(seq_len=2).survey(folder)
