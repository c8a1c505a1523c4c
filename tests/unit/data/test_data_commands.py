"""``hierdist data``."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from lightning_dist.cli import main
from lightning_dist.data.formats import FORMATS, make_format
from lightning_dist.data.formats.detection import detect_format
from lightning_dist.data.index.index_file import IndexElsewhere
from lightning_dist.errors import ConfigError, ForeignDataError, UnknownOptionError
from tests.support.folders import PathFolder, all_samples, contents

FOREIGN = Path(__file__).parent / "foreign"


def _texts(folder: Path) -> Path:
    (folder / "texts").mkdir()
    for number in range(12):
        (folder / "texts" / f"{number:02d}.txt").write_text(f"text {number} " * (20 + 7 * number))
    return folder / "texts"


def _write(folder: Path, *more: str) -> Path:
    out = folder / "out"
    texts = _texts(folder)
    assert main(["data", "write", str(texts), "--out", str(out), "--seq-len", "32", "--shard-size", "1kB", *more]) == 0
    return out


def test_write_shows_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _write(tmp_path, "--eos", "--workers", "2")
    shown = capsys.readouterr().out
    assert "shards written, 0 were finished before" in shown
    for text in ("tokens", "packed", "uint8", "256", "of positions are padding", "in no sample", "CRC-32"):
        assert text in shown
    assert main(["data", "info", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == shown.splitlines()[2:]


def test_verify_names_damaged_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _write(tmp_path, "--chunk-size", "200")
    capsys.readouterr()
    assert main(["data", "verify", str(out)]) == 0
    assert "as indexed" in capsys.readouterr().out
    path = out / "shard-000001.bin"
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    (out / "shard-000002.bin").unlink()
    assert main(["data", "verify", str(out), "--workers", "3"]) == 1
    found = capsys.readouterr()
    assert "(shard-000001.bin, bytes 192 to 385) has the checksum" in found.err
    assert "shard-000002.bin" in found.err
    assert "shard-000003.bin" not in found.err
    assert "chunks damaged" in found.out


def test_verify_reads_all_indexes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _write(tmp_path, "--eos")
    path = out / "shard-000000.bin"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1  # in no window
    path.write_bytes(data)
    capsys.readouterr()
    assert main(["data", "verify", str(out), "--format", "tokens"]) == 0
    assert main(["data", "verify", str(out)]) == 1
    assert "(tokens): as indexed" in capsys.readouterr().out


def test_index_beside_the_data_or_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    data.mkdir()
    (data / "a.jsonl").write_bytes(b"1\n2\n3\n")
    (data / "b.jsonl.gz").write_bytes(gzip.compress(b"4\n"))
    assert main(["data", "info", str(data)]) == 2
    assert f"hierdist data index {data} --format jsonl" in capsys.readouterr().err
    assert main(["data", "index", str(data), "--out", str(elsewhere)]) == 0
    assert sorted(contents(data)) == ["a.jsonl", "b.jsonl.gz"]
    assert main(["data", "verify", str(data), "--index", str(elsewhere)]) == 0
    assert main(["data", "info", str(data), "--index", str(elsewhere)]) == 0
    folder = IndexElsewhere(PathFolder(data), PathFolder(elsewhere))
    reader = make_format(detect_format(folder))
    assert all_samples(reader, data, reader.index(folder)) == [1, 2, 3, 4]
    assert main(["data", "index", str(data)]) == 0
    assert contents(data)["index.json"] == contents(elsewhere)["index.json"]
    assert main(["data", "index", str(data)]) == 0  # once more, in its place


def test_packed_index_of_shards_that_others_have_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.asarray([5, 6, 0, 7, 0, 8, 9, 9, 9, 0] * 30, dtype="<u2").tofile(tmp_path / "train.bin")
    assert main(["data", "index", str(tmp_path)]) == 2
    assert "--seq-len 1024" in capsys.readouterr().err
    assert main(["data", "index", str(tmp_path), "--seq-len", "10"]) == 2
    assert "--dtype uint16" in capsys.readouterr().err
    assert main(["data", "index", str(tmp_path), "--seq-len", "10", "--dtype", "uint16"]) == 0
    pack = ["data", "index", str(tmp_path), "--format", "packed", "--eos", "0"]
    assert main(pack) == 0
    assert "3.23% of positions are padding" in capsys.readouterr().out
    reader = make_format("packed")
    rows = all_samples(reader, tmp_path, reader.index(PathFolder(tmp_path)))
    assert len(rows) == 31  # two of 5, three of 3, five of 2


def test_an_index_that_was_written_with_its_shards_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _write(tmp_path)
    before = (out / "index.json").read_bytes()
    again = ["data", "index", str(out), "--format", "tokens", "--seq-len", "16", "--dtype", "uint8"]
    assert main(again) == 2
    assert "give another folder by --out" in capsys.readouterr().err
    assert (out / "index.json").read_bytes() == before
    assert main([*again, "--out", str(tmp_path / "other")]) == 0


def test_indexes_of_other_libraries_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mds_plain", "litdata_plain"):
        assert main(["data", "index", str(FOREIGN / name)]) == 2
        assert "has an index of its own" in capsys.readouterr().err
        assert main(["data", "info", str(FOREIGN / name)]) == 0
        assert main(["data", "verify", str(FOREIGN / name)]) == 0
        assert "no checksums" in capsys.readouterr().out
    (tmp_path / "index.json").write_text('{"version": 1}')
    (tmp_path / "a.jsonl").write_text("1\n")
    assert main(["data", "index", str(tmp_path)]) == 2
    assert "is another library's" in capsys.readouterr().err
    assert (tmp_path / "index.json").read_text() == '{"version": 1}'


def test_mistakes_exit_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = ["data", "write", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--seq-len", "8"]
    assert main(write) == 2
    assert "neither a file nor a folder" in capsys.readouterr().err
    assert main([*write, "--option", "anon"]) == 2
    assert main([*write, "--workers", "0"]) == 2
    (tmp_path / "a.jsonl").write_text("1\n")
    (tmp_path / "a.tar").write_text("1\n")
    assert main(["data", "info", str(tmp_path)]) == 2
    assert "several formats (jsonl, tar)" in capsys.readouterr().err


def test_formats_are_made_by_name() -> None:
    assert {name: FORMATS[name].name for name in FORMATS if name != "mapped"} == {  # type: ignore[attr-defined]
        name: name for name in FORMATS if name != "mapped"
    }
    with pytest.raises(UnknownOptionError, match="Did you mean tokens"):
        make_format("token")
    with pytest.raises(ConfigError, match="cannot be made of decode"):
        make_format("tokens", decode=1)
    assert make_format("tokens", seq_len=None).seq_len is None  # type: ignore[attr-defined]


def test_folder_without_data_is_no_format(tmp_path: Path) -> None:
    with pytest.raises(ForeignDataError, match="has no files"):
        detect_format(PathFolder(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ForeignDataError, match="hierdist data write"):
        detect_format(PathFolder(tmp_path))
