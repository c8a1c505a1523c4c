"""What ranks print, with their names before it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.elastic.agent.output import Output, split_pieces
from lightning_dist.errors import LaunchError


def test_lines_are_cut_at_every_kind_of_end() -> None:
    assert split_pieces(b"a\nb\r\n10%\r20%\rrest") == ([b"a\n", b"b\r\n", b"10%\r", b"20%\r"], b"rest")


def test_a_carriage_return_at_the_end_waits_for_its_line_feed() -> None:
    assert split_pieces(b"a\r") == ([], b"a\r")


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n"])), st.integers(0, 20))
def test_nothing_is_lost_wherever_the_data_are_cut(parts: list[bytes], cut: int) -> None:
    data = b"".join(parts)
    first, rest = split_pieces(data[:cut])
    second, last = split_pieces(rest + data[cut:])
    assert b"".join([*first, *second, last]) == data
    assert [*first, *second] == split_pieces(data)[0]


def printed(tmp_path: Path, *, logs: Path | None, with_prefix: bool = True) -> tuple[str, str]:
    with (
        (tmp_path / "out").open("wb") as out,
        (tmp_path / "err").open("wb") as err,
        Output(with_prefix=with_prefix, logs=logs, stdout=out.fileno(), stderr=err.fileno()) as output,
    ):
        output.open()
        for rank in range(2):
            with output.of_rank(f"a:{rank}", f"round-1/rank-{rank}.log") as prints:
                os.write(prints.stdout, b"hello\nwor")
                os.write(prints.stdout, b"ld")
                os.write(prints.stderr, b"oh\n")
    return (tmp_path / "out").read_text(), (tmp_path / "err").read_text()


def test_each_line_has_its_ranks_name(tmp_path: Path) -> None:
    out, err = printed(tmp_path, logs=None)
    assert sorted(out.splitlines()) == ["[a:0] hello", "[a:0] world", "[a:1] hello", "[a:1] world"]
    assert sorted(err.splitlines()) == ["[a:0] oh", "[a:1] oh"]


def test_each_rank_has_a_file_without_names(tmp_path: Path) -> None:
    out, _ = printed(tmp_path, logs=tmp_path / "logs", with_prefix=False)
    assert sorted(out.split()) == ["hello", "hello", "world", "world"]
    for rank in range(2):
        lines = (tmp_path / "logs" / "round-1" / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(lines) == ["hello", "oh", "world"]


def test_without_names_and_files_ranks_print_by_themselves(tmp_path: Path) -> None:
    with (
        (tmp_path / "out").open("wb") as out,
        Output(with_prefix=False, stdout=out.fileno()) as output,
        output.of_rank("a:0", "log") as prints,
    ):
        assert prints.stdout == out.fileno()


def test_what_still_holds_its_end_is_not_waited_for(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        with Output(stdout=out.fileno(), stderr=out.fileno()) as output, output.of_rank("a:0", "log") as prints:
            output.open()
            kept = os.dup(prints.stdout)
            os.write(prints.stdout, b"no end")
        os.close(kept)
    assert (tmp_path / "out").read_text() == "[a:0] no end"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"--logs .*file/logs cannot be made"):
        Output(logs=tmp_path / "file" / "logs")


def test_a_file_that_cannot_be_made_ends_no_training(tmp_path: Path) -> None:
    with (
        (tmp_path / "out").open("wb") as out,
        Output(logs=tmp_path / "logs", stdout=out.fileno(), stderr=out.fileno()) as output,
    ):
        output.open()
        (tmp_path / "logs" / "round-1").write_text("in the way")
        with output.of_rank("a:0", "round-1/rank-0.log") as prints:
            os.write(prints.stdout, b"hello\n")
        output.close()
        assert (tmp_path / "out").read_text() == "[a:0] hello\n"
