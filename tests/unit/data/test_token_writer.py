"""Writing token shards: the same result whatever the workers, and wherever it was ended before."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from hypothesis import given

from lightning_dist.data.formats.packed import PackedFormat
from lightning_dist.data.formats.tokens import TokensFormat
from lightning_dist.data.index.index_file import PLAN_NAME
from lightning_dist.data.storage.output import WriteFolder, open_write_folder
from lightning_dist.data.storage.shards import open_read_folder
from lightning_dist.data.writing import texts
from lightning_dist.data.writing.encoders import ByteEncoder, FileEncoder, dtype_for, open_encoder
from lightning_dist.data.writing.texts import BLOCK_BYTES, Document, deal, documents_of, read_block
from lightning_dist.data.writing.token_writer import TokenSettings, write_tokens
from lightning_dist.errors import ConfigError, ForeignDataError
from tests.support.folders import EndedWriting, EndingFolder, PathFolder, all_samples, contents

SETTINGS = TokenSettings(seq_len=16, eos=True, shard_size=200, chunk_size=64)
DOCUMENTS = [bytes([65 + number]) * (37 * number % 90) for number in range(26)]


@given(sizes=st.lists(st.integers(0, 5 << 20), max_size=20), shard_bytes=st.integers(1, 6 << 20))
def test_blocks_cover_each_document_once(sizes: list[int], shard_bytes: int) -> None:
    shards = deal(sizes, shard_bytes=shard_bytes)
    blocks = [block for shard in shards for block in shard]
    covered = {number: 0 for number, size in enumerate(sizes) if size}
    for block in blocks:
        assert covered[block.document] == block.start
        assert 0 < block.stop - block.start <= BLOCK_BYTES
        covered[block.document] = block.stop
    assert covered == {number: size for number, size in enumerate(sizes) if size}
    assert blocks == sorted(blocks)
    held = [sum(block.stop - block.start for block in shard) for shard in shards]
    assert all(shard_bytes <= size < shard_bytes + BLOCK_BYTES for size in held[:-1])


@pytest.mark.parametrize("pattern", ["x", "é", "€", "𝄞", "\xff", "word\n", "é\n"])
@pytest.mark.parametrize("shift", range(4))
def test_long_documents_are_cut_between_characters_or_lines(pattern: str, shift: int, tmp_path: Path) -> None:
    text = "a" * shift + pattern * (2 * BLOCK_BYTES // len(pattern.encode()) + 10)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    for document in (*documents_of([path]), *documents_of([text.encode()])):
        blocks = [
            read_block(document, block) for shard in deal([document.size_bytes], shard_bytes=1) for block in shard
        ]
        assert len(blocks) == 3
        assert b"".join(blocks).decode() == text
        for block in blocks:
            block.decode()
        assert "\n" not in pattern or all(block.endswith(b"\n") for block in blocks)


def test_bytes_that_are_no_text_are_cut_somewhere() -> None:
    document = Document("x", b"\x80" * (BLOCK_BYTES + 100), BLOCK_BYTES + 100, 0)
    blocks = [read_block(document, block) for shard in deal([document.size_bytes], shard_bytes=1) for block in shard]
    assert [len(block) for block in blocks] == [BLOCK_BYTES, 100]


def test_windows_and_rows_hold_the_text(tmp_path: Path) -> None:
    written = write_tokens(DOCUMENTS, out=tmp_path / "out", settings=SETTINGS, workers=3)
    assert len(written.index.shards) > 4
    folder = PathFolder(tmp_path / "out")
    shards = [np.fromfile(tmp_path / "out" / name, dtype=np.uint8) for name in written.index.shards]
    assert np.concatenate(shards).tobytes() == b"".join(document + b"\0" for document in DOCUMENTS if document)
    index = TokensFormat().index(folder)
    assert index.fingerprint == written.index.fingerprint
    expected = [shard[at : at + 17].tolist() for shard in shards for at in range(0, len(shard) - 16, 16)]
    assert [sample.tolist() for sample in all_samples(TokensFormat(), tmp_path / "out", index)] == expected
    assert written.packed is not None
    assert PackedFormat().index(folder).fingerprint == written.packed.fingerprint
    # Made afterwards, it is the same.
    (tmp_path / "out" / "packed.json").unlink()
    assert PackedFormat().survey(folder, workers=2).fingerprint == written.packed.fingerprint
    assert TokensFormat(16, "uint8", 64).survey(folder).crc32 is not None
    assert index.properties["vocab_size"] == 256
    assert index.properties["tokens"] == sum(map(len, shards))
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")) == [PLAN_NAME]


def test_result_does_not_depend_on_workers(tmp_path: Path) -> None:
    for workers in (1, 2, 7):
        write_tokens(DOCUMENTS, out=tmp_path / f"{workers}", settings=SETTINGS, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "7")


def test_ended_at_any_operation_and_started_again(tmp_path: Path) -> None:
    whole = EndingFolder(open_write_folder(tmp_path / "whole"))
    write_tokens(DOCUMENTS, out=whole, settings=SETTINGS, workers=1)
    expected = contents(tmp_path / "whole")
    shards = {name for name in expected if name.endswith(".bin")}
    for end in range(whole.operations):
        ended = EndingFolder(open_write_folder(tmp_path / f"{end}"), end_before=end)
        with pytest.raises(EndedWriting):
            write_tokens(DOCUMENTS, out=ended, settings=SETTINGS, workers=1)
        records = set(contents(tmp_path / f"{end}")) - set(expected)
        assert "index.json" not in ended.written or set(expected) <= set(contents(tmp_path / f"{end}"))
        again = EndingFolder(open_write_folder(tmp_path / f"{end}"))
        result = write_tokens(DOCUMENTS, out=again, settings=SETTINGS, workers=2)
        assert contents(tmp_path / f"{end}") == expected
        finished = {name[1:].replace(".json", ".bin") for name in records if name.startswith(".shard")}
        assert not finished & set(again.written)
        assert result.shards_kept + result.shards_written == len(shards)
        assert result.shards_written == len(shards & set(again.written))


def test_ended_inside_any_file_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the bytes of a file are on disk, and between its renaming and that of the folder's entry."""
    write_tokens(DOCUMENTS, out=tmp_path / "whole", settings=SETTINGS, workers=1)
    expected = contents(tmp_path / "whole")
    sync, calls = os.fsync, 0

    def ending(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == end:
            raise EndedWriting
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", ending)
    for end in (1, 2, 3, 4, 5, 8, 9):
        calls = 0
        with pytest.raises(EndedWriting):
            write_tokens(DOCUMENTS, out=tmp_path / f"{end}", settings=SETTINGS, workers=1)
        folder = PathFolder(tmp_path / f"{end}")
        if PLAN_NAME in contents(tmp_path / f"{end}"):
            with pytest.raises(ForeignDataError, match="half written: start hierdist data write again"):
                TokensFormat().index(folder)
            with pytest.raises(ForeignDataError, match="half written"):
                TokensFormat(16, "uint8").survey(folder)
        write_tokens(DOCUMENTS, out=tmp_path / f"{end}", settings=SETTINGS, workers=1)
        assert contents(tmp_path / f"{end}") == expected


KILLED = """
import os, signal, sys
from lightning_dist import TokenSettings, write_tokens

write, calls = os.fsync, 0

def killing(descriptor):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    write(descriptor)

os.fsync = killing
documents = [bytes([65 + number]) * (37 * number % 90) for number in range(26)]
settings = TokenSettings(seq_len=16, eos=True, shard_size=200, chunk_size=64)
write_tokens(documents, out=sys.argv[1], settings=settings, workers=2)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("call", [1, 6, 13])
def test_killed_and_started_again(call: int, tmp_path: Path) -> None:
    """By the kernel; the tests above do the same by an exception."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a"), str(call)], timeout=100)
    assert killed.returncode == -signal.SIGKILL
    write_tokens(DOCUMENTS, out=tmp_path / "a", settings=SETTINGS)
    write_tokens(DOCUMENTS, out=tmp_path / "b", settings=SETTINGS)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_half_written_files_are_not_seen(tmp_path: Path) -> None:
    folder = open_write_folder(tmp_path)
    folder.write("a.bin", b"first")

    with pytest.raises(Exception, match=r"cannot write .*a\.bin"):
        folder.write("a.bin", "no bytes")  # type: ignore[arg-type]
    assert folder.read("a.bin") == b"first"
    assert folder.read("b.bin") is None


def test_complete_data_set_is_left_alone_and_others_are_refused(tmp_path: Path) -> None:
    write_tokens(DOCUMENTS, out=tmp_path / "out", settings=SETTINGS)
    before = contents(tmp_path / "out")
    again = write_tokens(DOCUMENTS, out=tmp_path / "out", settings=SETTINGS)
    assert (again.shards_written, again.shards_kept) == (0, len(again.index.shards))
    for documents, settings, differing in (
        (DOCUMENTS[:-1], SETTINGS, "documents, text_bytes, texts"),
        (DOCUMENTS[::-1], SETTINGS, "texts"),
        (DOCUMENTS, TokenSettings(seq_len=8, eos=True, shard_size=200, chunk_size=64), "seq_len"),
        (DOCUMENTS, TokenSettings(seq_len=16, shard_size=200, chunk_size=64), "eos"),
    ):
        with pytest.raises(ConfigError, match=rf"was written from something else \(differing: {differing}\)"):
            write_tokens(documents, out=tmp_path / "out", settings=settings)
    assert contents(tmp_path / "out") == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="has files already"):
        write_tokens(DOCUMENTS, out=tmp_path / "other", settings=SETTINGS)


def test_two_that_write_the_same_wait_for_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as executor:
        calls = [executor.submit(write_tokens, DOCUMENTS, out=tmp_path / "a", settings=SETTINGS) for _ in range(3)]
        results = [call.result() for call in calls]
    shards = len(results[0].index.shards)
    assert sorted(result.shards_written for result in results) == [0, 0, shards]
    write_tokens(DOCUMENTS, out=tmp_path / "b", settings=SETTINGS)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


class ClaimedByAnother(EndingFolder):
    """Before a file is written, another process says that the folder is for something else, as both begin at once."""

    def __init__(self, folder: WriteFolder, before: str) -> None:
        super().__init__(folder)
        self._before = before

    def write(self, name: str, data: bytes | memoryview) -> None:
        super().write(name, data)
        if name == self._before:
            super().write(PLAN_NAME, json.dumps({"seq_len": 8}).encode())


@pytest.mark.parametrize("after", [PLAN_NAME, "shard-000000.bin", "last"])
def test_two_that_write_something_else_at_a_url_do_not_both_finish(tmp_path: Path, after: str) -> None:
    if after == "last":
        last = write_tokens(DOCUMENTS, out=tmp_path / "whole", settings=SETTINGS).index.shards[-1]
        after = f".{last.removesuffix('.bin')}.json"
    folder = ClaimedByAnother(open_write_folder(f"memory://{tmp_path.name}/{after}"), after)
    with pytest.raises(ConfigError, match="is being written to by another process, from other texts"):
        write_tokens(DOCUMENTS, out=folder, settings=SETTINGS, workers=1)
    assert "index.json" not in folder.written


def test_changed_text_is_noticed_when_writing_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"x" * 1000)
    ended = EndingFolder(open_write_folder(tmp_path / "out"), end_before=2)
    with pytest.raises(EndedWriting):
        write_tokens([text], out=ended, settings=SETTINGS)
    text.write_bytes(b"y" * 1000)
    with pytest.raises(ConfigError, match=r"was begun from something else \(differing: texts\)"):
        write_tokens([text], out=tmp_path / "out", settings=SETTINGS)


def test_folders_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", ".hidden", ".git/x"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    documents = documents_of([tmp_path / "in", b"bytes", tmp_path / "in" / "b.txt"])
    assert [document.name for document in documents] == ["0/a/b/c.txt", "0/a/z.txt", "0/b.txt", "1", "2/b.txt"]
    assert documents[3].read(1, 3) == b"yt"
    (tmp_path / "in" / "b.txt").write_text("b")
    with pytest.raises(ConfigError, match="became shorter"):
        documents[2].read(0, 5)
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        documents_of([tmp_path / "none"])
    with pytest.raises(ConfigError, match="there is no text"):
        documents_of([b""])


def test_settings_and_texts_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seq_len=0"):
        TokenSettings(seq_len=0)
    with pytest.raises(ConfigError, match="shard_size='1 furlong'"):
        TokenSettings(seq_len=8, shard_size="1 furlong")
    with pytest.raises(ConfigError, match="give 9 tokens, and no shard has the 17"):
        write_tokens([b"too short"], out=tmp_path / "a", settings=TokenSettings(seq_len=16))
    with pytest.raises(ConfigError, match="document 1 has the byte 0 in it"):
        write_tokens([b"text" * 9, b"a\0b" * 9], out=tmp_path / "b", settings=SETTINGS)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / PLAN_NAME).write_text("{")
    with pytest.raises(ForeignDataError, match="is not JSON"):
        write_tokens(DOCUMENTS, out=tmp_path / "c", settings=SETTINGS)


def test_remote_folders(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/out"
    written = write_tokens(DOCUMENTS, out=url, settings=SETTINGS)
    write_tokens(DOCUMENTS, out=tmp_path, settings=SETTINGS)
    folder = open_read_folder(url)
    for name, data in contents(tmp_path).items():
        assert folder.read(name) == data
    assert folder.local_path("index.json") is None
    assert TokensFormat().index(folder).fingerprint == written.index.fingerprint
    assert write_tokens(DOCUMENTS, out=url, settings=SETTINGS).shards_written == 0


def test_progress_counts_all_text(tmp_path: Path) -> None:
    done: list[int] = []
    total: list[int] = []
    lock = threading.Lock()

    def progress(size_bytes: int) -> None:
        with lock:
            done.append(size_bytes)

    write_tokens(DOCUMENTS, out=tmp_path, settings=SETTINGS, progress=progress, begin=total.append)
    assert total == [sum(done)] == [sum(map(len, DOCUMENTS))]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["the cat sat on the mat, the dog ran"] * 20, trainer)
    model.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    model.save(str(path))
    return path


def test_tokenizer_files(tokenizer: Path, tmp_path: Path) -> None:
    documents = [b"the cat sat on the dog " * 30, "é and the mat ".encode() * 20]
    settings = TokenSettings(seq_len=8, tokenizer=str(tokenizer), eos=True, shard_size=600)
    written = write_tokens(documents, out=tmp_path / "out", settings=settings)
    tokens = np.concatenate([np.fromfile(tmp_path / "out" / name, "<u2") for name in written.index.shards])
    assert written.index.properties["dtype"] == "uint16"
    assert written.index.properties["eos"] == 0
    assert (tokens == 0).sum() == 2
    model = tokenizers.Tokenizer.from_file(str(tokenizer))
    assert model.decode(tokens.tolist()) == b"".join(documents).decode()
    assert written.index.properties["vocab_size"] == model.get_vocab_size()
    assert written.index.properties["tokenizer"].startswith("tokenizer.json:")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        write_tokens([b"\xff\xfe" * 50], out=tmp_path / "bad", settings=settings)


def test_tokenizers_that_cannot_be_used(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--eos </s>: .* no such token; it has <\|endoftext\|>"):
        open_encoder(str(tokenizer), eos="</s>")
    with pytest.raises(ConfigError, match="byte 0"):
        open_encoder("bytes", eos="</s>")
    with pytest.raises(ConfigError, match=r"give 'bytes', or the path of a tokenizer\.json"):
        open_encoder("gpt2", eos=None)
    text = json.loads(tokenizer.read_text())
    tokenizer.write_text("{}")
    with pytest.raises(ConfigError, match="is no file of the package tokenizers"):
        open_encoder(str(tokenizer), eos=None)
    text["added_tokens"] = []
    text["model"]["vocab"] = {key: value for key, value in text["model"]["vocab"].items() if len(key) == 1}
    text["model"]["merges"] = []
    tokenizer.write_text(json.dumps(text))
    assert FileEncoder(tokenizer, eos=None).eos is None
    with pytest.raises(ConfigError, match="none of the usual tokens"):
        open_encoder(str(tokenizer), eos=True)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ForeignDataError, match="pip install tokenizers"):
        open_encoder(str(tokenizer), eos=None)


def test_types_hold_the_vocabulary() -> None:
    sizes = (1, 256, 257, 65536, 65537)
    assert [dtype_for(size) for size in sizes] == ["uint8", "uint8", "uint16", "uint16", "uint32"]
    assert ByteEncoder(with_eos=False).encode(b"a\0", "x").tolist() == [97, 0]


def test_blocks_are_encoded_apart_wherever_shards_end(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "BLOCK_BYTES", 300)
    monkeypatch.setattr(texts, "_LOOK_BACK_BYTES", 100)
    document = b"the cat sat on the mat\n" * 60
    streams = []
    for size in (100, 700, 10_000):
        settings = TokenSettings(seq_len=4, tokenizer=str(tokenizer), shard_size=size)
        written = write_tokens([document], out=tmp_path / f"{size}", settings=settings)
        streams.append([np.fromfile(tmp_path / f"{size}" / name, "<u2").tolist() for name in written.index.shards])
    assert [len(shards) for shards in streams] == [5, 2, 1]
    joined = [[token for shard in shards for token in shard] for shards in streams]
    assert joined[0] == joined[1] == joined[2]
