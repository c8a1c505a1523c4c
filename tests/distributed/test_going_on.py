"""A run that is started again goes on from its newest checkpoint, whatever its script says."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist.checkpoint.keeper import client
from tests.distributed.restarted_runs import MEMORY, STEPS, Start, fit, prepare
from tests.support.keepers import ending_keepers
from tests.support.ranks import Died, RankPool

STORED = {"mode": "async_sharded"}
KINDS = [pytest.param(STORED, id="sharded", marks=pytest.mark.sweep), pytest.param("full", id="full")]


def run_killed(ranks: RankPool, start: Start, world_size: int = 2) -> None:
    died = ranks.run(fit, world_size=world_size, args=(start,), may_die=range(world_size))
    assert [type(each) for each in died] == [Died] * world_size


def uninterrupted(ranks: RankPool, folder: Path, parallel: Any = "ddp") -> dict[str, torch.Tensor]:
    start = prepare(Start(folder, parallel=parallel, checkpoint=STORED))
    return ranks.run(fit, world_size=2, args=(start,))[0][1]  # type: ignore[no-any-return]


def assert_same(got: list[Any], step: int, wanted: dict[str, torch.Tensor]) -> None:
    for first, weights in got:
        assert first == step
        for name, value in wanted.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.sweep), "zero2"])
def test_from_a_snapshot_that_only_memory_has(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    start = Start(tmp_path / "run", killed_at=5, parallel=parallel, saves_every=3)
    prepare(start)
    with ending_keepers(start.checkpoints):
        run_killed(ranks, start)
        keeper = client.find(client.name_of(str(start.checkpoints)))
        assert keeper is not None
        assert [name.partition("@")[0] for name in keeper.folders()] == ["step=4.ckpt"]
        assert os.listdir(start.checkpoints) == ["step=3.ckpt"]
        got = ranks.run(fit, world_size=2, args=(replace(start, round=2, killed_at=None),))
    assert_same(got, 4, uninterrupted(ranks, tmp_path / "whole", parallel))


@pytest.mark.parametrize(
    ("every", "saves_every"), [(1, 100), (3, 3), pytest.param(3, 100, marks=pytest.mark.sweep)], ids=str
)
def test_a_snapshot_is_whole_before_the_next_step_is_done(
    ranks: RankPool, tmp_path: Path, every: int, saves_every: int
) -> None:
    """However long it takes, and however long storage takes: the fault comes as soon as that step is done."""
    checkpoint = {**MEMORY, "mode": "async_sharded", "memory_every_n_steps": every}
    start = Start(tmp_path / "run", killed_at=4, awaits=False, checkpoint=checkpoint, saves_every=saves_every)
    prepare(start)
    with ending_keepers(start.checkpoints):
        run_killed(ranks, start)
        got = ranks.run(fit, world_size=2, args=(replace(start, round=2, killed_at=None, awaits=True),))
    assert_same(got, 3, uninterrupted(ranks, tmp_path / "whole"))


def test_from_storage_where_memory_is_gone_or_older(ranks: RankPool, tmp_path: Path) -> None:
    start = Start(tmp_path / "run", killed_at=4, saves_every=3, checkpoint={**MEMORY, "memory_every_n_steps": 2})
    prepare(start)
    with ending_keepers(start.checkpoints):
        run_killed(ranks, start)
        keeper = client.find(client.name_of(str(start.checkpoints)))
        assert keeper is not None
        keeper.end()
        got = ranks.run(fit, world_size=2, args=(replace(start, round=2, killed_at=None),))
    assert_same(got, 3, uninterrupted(ranks, tmp_path / "whole"))


@pytest.mark.parametrize("checkpoint", KINDS)
def test_from_storage_in_a_folder_that_the_script_does_not_name(
    ranks: RankPool, tmp_path: Path, checkpoint: Any
) -> None:
    """Lightning's logger counts versions: the second start's own folder would be another one."""
    start = Start(tmp_path / "run", killed_at=4, saves_every=2, checkpoint=checkpoint, names_folder=False)
    start = replace(start, others={"logger": True})
    prepare(start)
    run_killed(ranks, start)
    got = ranks.run(fit, world_size=2, args=(replace(start, round=2, killed_at=None),))
    assert_same(got, 4, uninterrupted(ranks, tmp_path / "whole"))
    (folder,) = start.folder.rglob("checkpoints")
    assert folder.parent.name == "version_0"
    assert sorted(path.name for path in folder.iterdir())[-1].startswith(f"step={STEPS}")


@pytest.mark.parametrize("checkpoint", KINDS)
def test_what_an_earlier_run_saved_there_is_left_alone(ranks: RankPool, tmp_path: Path, checkpoint: Any) -> None:
    start = Start(tmp_path / "run", saves_every=2, checkpoint=checkpoint, killed_at=5)
    prepare(start)
    run_killed(ranks, start)
    shutil.rmtree(start.agent)  # a run of the same script is another one
    other = prepare(replace(start, run="b-run", killed_at=1))
    run_killed(ranks, other)
    got = ranks.run(fit, world_size=2, args=(replace(other, round=2, killed_at=None),))
    assert_same(got, 0, uninterrupted(ranks, tmp_path / "whole"))


def test_a_launch_of_the_same_name_is_the_same_run(ranks: RankPool, tmp_path: Path) -> None:
    """All agents are gone, and the command is given once more."""
    start = Start(tmp_path / "run", saves_every=2, checkpoint=STORED, killed_at=3)
    prepare(start)
    run_killed(ranks, start)
    shutil.rmtree(start.agent)
    got = ranks.run(fit, world_size=2, args=(prepare(replace(start, killed_at=None)),))
    assert_same(got, 2, uninterrupted(ranks, tmp_path / "whole"))


def test_at_the_first_start_and_at_a_path_the_script_is_heeded(ranks: RankPool, tmp_path: Path) -> None:
    """Until the run has saved something itself; then it goes on from there."""
    earlier = Start(tmp_path / "run", saves_every=2, checkpoint=STORED, killed_at=3)
    prepare(earlier)
    run_killed(ranks, earlier)
    path = str(earlier.checkpoints / "step=2.ckpt")
    later = replace(earlier, run="b-run", ckpt_path=path, saves_every=3, killed_at=4)
    run_killed(ranks, later)
    first, second = replace(later, run="c-run", killed_at=None), replace(later, round=2, killed_at=None)
    assert [each[0] for each in ranks.run(fit, world_size=2, args=(first,))] == [2, 2]
    assert [each[0] for each in ranks.run(fit, world_size=2, args=(second,))] == [3, 3]
