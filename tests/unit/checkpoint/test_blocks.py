"""Exports read a tensor front to back, each chunk once; and the file they write is one of torch's."""

from __future__ import annotations

import collections
import random
import zipfile
from pathlib import Path

import pytest
import torch

from lightning_dist.checkpoint.archive import LaterTensor, write_archive
from lightning_dist.checkpoint.blocks import read_blocks, row_ranges
from lightning_dist.checkpoint.catalog import open_checkpoint
from lightning_dist.checkpoint.host_pieces import bytes_of
from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.manifest import ByteRange, Chunk, TensorEntry
from lightning_dist.checkpoint.storage import open_folder
from tests.support.saves import dealt, every_type, same, save_by_ranks


def entry_of(*chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorEntry:
    kept = tuple(Chunk(offsets, sizes, ByteRange("f", 0, 4, 0)) for offsets, sizes in chunks)
    return TensorEntry("float32", (9, 4), kept)


@pytest.mark.parametrize(
    ("entry", "ranges"),
    [
        (entry_of(((4, 0), (5, 4)), ((0, 0), (4, 4))), [(0, 4), (4, 9)]),  # by rows
        (entry_of(((0, 0), (9, 1)), ((0, 1), (9, 3))), [(0, 9)]),  # by columns
        (entry_of(((0, 0), (4, 2)), ((0, 2), (4, 2)), ((4, 0), (5, 2)), ((4, 2), (5, 2))), [(0, 4), (4, 9)]),  # by both
        (entry_of(((0, 0), (6, 2)), ((0, 2), (3, 2)), ((3, 2), (6, 2)), ((6, 0), (3, 2))), [(0, 9)]),  # like bricks
        (entry_of(), []),
    ],
)
def test_a_block_ends_where_all_chunks_of_its_rows_end(entry: TensorEntry, ranges: list[tuple[int, int]]) -> None:
    assert row_ranges(entry) == ranges


@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_the_tensor_and_each_chunk_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    wholes = {**every_type(), "large": torch.randn(40, 9, 5)}
    parts = {name: dealt(name, whole, 3, rng) for name, whole in wholes.items()}
    states = [{name: part[rank] for name, part in parts.items()} for rank in range(3)]
    save_by_ranks(states, open_folder(tmp_path / "c"), chunk_bytes=300)
    checkpoint = open_checkpoint(open_folder(tmp_path / "c"))
    read: collections.Counter[tuple[str, int]] = collections.Counter()
    true_read = LocalFolder.read_into

    def counting(self: LocalFolder, name: str, start: int, target: memoryview) -> None:
        read[name, start] += 1
        true_read(self, name, start, target)

    monkeypatch.setattr(LocalFolder, "read_into", counting)
    for name, whole in wholes.items():
        assert b"".join(bytes(block) for block in read_blocks(checkpoint, name)) == bytes(bytes_of(whole)), name
    assert set(read.values()) == {1}


def test_an_archive_is_what_torch_saves(tmp_path: Path) -> None:
    """Tensors of all types, those that come later, and the same one twice."""
    six = torch.arange(6.0)
    later = LaterTensor("float32", (2, 3), lambda: iter([bytes_of(six[:4]), bytes_of(six[4:])]))
    new = LaterTensor("uint16", (6,), lambda: iter([bytes_of(six.to(torch.uint16))]))
    plain = {"list": [1, ("a", None)], "ordered": collections.OrderedDict(b=2.5), "dtype": torch.float16}
    state = {"state_dict": every_type(), "later": later, "again": later, "new": new, **plain}
    path = tmp_path / "a.pt"
    write_archive(state, path)
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert all(same(loaded["state_dict"][name], value) for name, value in every_type().items())
        assert torch.equal(loaded["later"], six.view(2, 3))
        assert loaded["later"] is loaded["again"]
        assert same(loaded["new"], six.to(torch.uint16))
        assert {name: loaded[name] for name in plain} == plain
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        numbers = len([name for name in archive.namelist() if "/data/" in name])
    assert numbers == len(every_type()) + 2
    reader = torch._C.PyTorchFileReader(str(path))
    assert {reader.get_record_offset(f"data/{number}") % 64 for number in range(numbers)} == {0}


def test_bytes_that_are_missing_are_no_archive(tmp_path: Path) -> None:
    short = LaterTensor("float32", (2,), lambda: iter([memoryview(b"1234")]))
    with pytest.raises(ValueError, match="8 bytes were announced, 4 came"):
        write_archive({"a": short}, tmp_path / "a.pt")
