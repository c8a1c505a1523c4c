"""Tar shards: the members are those that the standard library finds, grouped as WebDataset does."""

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lightning_dist.data.formats.tar import TarFormat
from lightning_dist.data.formats.tar_members import Buffer, Stream, TarDamage, members
from lightning_dist.data.index.index_file import index_bytes
from lightning_dist.errors import ConfigError, UnreadableShardError
from tests.support.folders import PathFolder, all_samples, open_chunk


def _tar(files: list[tuple[str, bytes]], *, kind: int = tarfile.PAX_FORMAT, mode: Any = "w") -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode, format=kind) as tar:
        folder = tarfile.TarInfo("a_folder.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1.5  # gives a pax header
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link.txt")
        link.type = tarfile.SYMTYPE
        link.linkname = "elsewhere"
        tar.addfile(link)
    return target.getvalue()


Names = st.text(st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=("Cs",)), min_size=1).map(
    lambda text: text * 3
)


@settings(deadline=None)
@given(
    files=st.lists(st.tuples(Names, st.binary(max_size=1200)), max_size=6),
    folder=st.sampled_from(["", "in/", "a/" * 60, "x" * 120 + "/"]),
    kind=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_members_are_those_of_the_standard_library(files: list[tuple[str, bytes]], folder: str, kind: int) -> None:
    data = _tar([(folder + name, content) for name, content in files], kind=kind)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar if info.isfile()]
    for source in (Buffer(memoryview(data)), Stream(io.BytesIO(data))):
        found = [(member.name, member.start, member.size_bytes) for member in members(source)]
        assert [place for _, *place in found] == [list(place) for _, *place in expected]
        assert [name for name, *_ in found] == [name for name, *_ in expected]


def test_ustar_prefixes_and_sizes_beyond_octal() -> None:
    data = _tar([("f" * 90 + "/" + "n" * 60 + ".txt", b"abc")], kind=tarfile.USTAR_FORMAT)
    assert [member.name for member in members(Buffer(memoryview(data)))] == ["f" * 90 + "/" + "n" * 60 + ".txt"]
    info = tarfile.TarInfo("big.bin")
    info.size = 9 << 30
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(TarDamage, match="ends at byte 512"):
        list(members(Buffer(memoryview(header))))


@pytest.mark.parametrize("cut", [1, 512, 700, 1024 + 100])
def test_cut_off_and_foreign_files_are_damage(cut: int) -> None:
    data = _tar([("a.txt", b"x" * 900), ("b.txt", b"y" * 900)], kind=tarfile.GNU_FORMAT)
    end = 512 + 2 * (512 + 1024)
    for source in (Buffer(memoryview(data[: end - cut])), Stream(io.BytesIO(data[: end - cut]))):
        with pytest.raises(TarDamage):
            list(members(source))
    for foreign in (b"", b"PK\x03\x04" * 300, data[:100]):
        with pytest.raises(TarDamage):
            list(members(Buffer(memoryview(foreign))))


def _samples(start: int, stop: int) -> list[tuple[str, bytes]]:
    files: list[tuple[str, bytes]] = []
    for number in range(start, stop):
        array = io.BytesIO()
        np.save(array, np.arange(number))
        files += [
            (f"./train/{number:04d}.JPG", b"\xff\xd8" + bytes([number])),
            (f"./train/{number:04d}.seg.json", json.dumps({"n": number}).encode()),
            (f"./train/{number:04d}.cls", str(number).encode()),
            (f"./train/{number:04d}.npy", array.getvalue()),
            (f"./train/{number:04d}.pyd", pickle.dumps({number})),
        ]
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    (path / "0.tar").write_bytes(_tar([("__meta__.json", b"{}"), ("README", b"no sample"), *_samples(0, 7)]))
    (path / "1.tar.gz").write_bytes(_tar(_samples(7, 10), mode="w:gz"))
    (path / "2.tar").write_bytes(_tar(_samples(10, 12), kind=tarfile.GNU_FORMAT))
    index = TarFormat().survey(PathFolder(path), workers=2)
    (path / "index.json").write_bytes(index_bytes(index))
    return path


def test_samples_are_bytes_by_ending(folder: Path) -> None:
    index = TarFormat().index(PathFolder(folder))
    assert index.samples.tolist() == [7, 3, 2]
    samples = all_samples(TarFormat(), folder, index)
    assert [sample["__key__"] for sample in samples] == [f"train/{number:04d}" for number in range(12)]
    assert set(samples[3]) == {"__key__", "jpg", "seg.json", "cls", "npy", "pyd"}
    assert samples[11]["jpg"] == b"\xff\xd8\x0b"
    assert samples[11]["pyd"] == pickle.dumps({11})


def test_decoding_is_asked_for(folder: Path) -> None:
    index = TarFormat().index(PathFolder(folder))
    basic = all_samples(TarFormat(decode="basic"), folder, index)[4]
    assert basic["seg.json"] == {"n": 4}
    assert basic["cls"] == 4
    assert basic["npy"].tolist() == [0, 1, 2, 3]
    assert isinstance(basic["pyd"], bytes)
    own = all_samples(TarFormat(decode={"jpg": len}), folder, index)[4]
    assert own["jpg"] == 3
    assert own["cls"] == b"4"
    with pytest.raises(UnreadableShardError, match=r"train/0000.jpg of chunk 0 .* ZeroDivisionError"):
        open_chunk(TarFormat(decode={"jpg": lambda data: 1 // 0}), folder, index, 0).sample(0)
    with pytest.raises(ConfigError, match="'basic'"):
        TarFormat(decode="all")


def test_pickled_arrays_are_not_loaded(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.asarray([{}], dtype=object), allow_pickle=True)
    (tmp_path / "0.tar").write_bytes(_tar([("a.npy", array.getvalue())]))
    index = TarFormat().survey(PathFolder(tmp_path))
    with pytest.raises(UnreadableShardError, match="allow_pickle=False"):
        open_chunk(TarFormat(decode="basic"), tmp_path, index, 0).sample(0)


def test_doubled_fields_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(_tar([("a.txt", b"1"), ("a.TXT", b"2")]))
    with pytest.raises(UnreadableShardError, match=r"0.tar cannot be read: a.TXT is there twice"):
        TarFormat().survey(PathFolder(tmp_path))
    (tmp_path / "0.tar").write_bytes(_tar([("a.txt", b"1"), ("b.txt", b"2")]))
    index = TarFormat().survey(PathFolder(tmp_path))
    (tmp_path / "0.tar").write_bytes(_tar([("a.txt", b"1"), ("a.cls", b"2")]))
    with pytest.raises(UnreadableShardError, match="1 samples, and 2 by the index"):
        open_chunk(TarFormat(), tmp_path, index, 0)
