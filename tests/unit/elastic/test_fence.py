"""Claims of rounds in a shared folder."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lightning_dist.elastic.leading.fence import Claim, Fence
from lightning_dist.errors import LaunchError


def test_of_many_that_claim_a_round_at_once_one_gets_it_and_all_know_who(tmp_path: Path) -> None:
    start, found = threading.Barrier(8), []

    def claim(index: int) -> None:
        fence = Fence(tmp_path, "run")
        start.wait(30)
        found.extend(fence.claim(number, host=f"host{index}", instance=str(index)) for number in range(1, 21))

    threads = [threading.Thread(target=claim, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    for number in range(1, 21):
        assert len({claim for claim in found if claim.round == number}) == 1
    assert len(list((tmp_path / "run").iterdir())) == 20  # and nothing else


def test_what_a_leader_has_claimed_it_may_claim_again_and_runs_do_not_mix(tmp_path: Path) -> None:
    own = Claim(1, "a", "x")
    fence = Fence(tmp_path, "one")
    assert fence.claim(1, host="a", instance="x") == own
    assert fence.claim(1, host="a", instance="x") == own
    assert Fence(tmp_path, "two").claim(1, host="b", instance="y") == Claim(1, "b", "y")


def test_a_folder_that_cannot_be_used_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be made: Not a directory; name one on storage that all hosts share"):
        Fence(tmp_path / "file", "run")
    fence = Fence(tmp_path, "run")
    (tmp_path / "run").rmdir()
    with pytest.raises(LaunchError, match="round 1 cannot be claimed"):
        fence.claim(1, host="a", instance="x")
    fence = Fence(tmp_path, "run")
    (tmp_path / "run" / "round-00000001").write_text("{")
    with pytest.raises(LaunchError, match="is no claim of a round"):
        fence.claim(1, host="a", instance="x")
