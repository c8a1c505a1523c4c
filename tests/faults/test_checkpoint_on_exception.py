"""A checkpoint that is asked for when training raises: it is whole before the fit ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_dist import AsyncShardedCheckpoint
from lightning_dist.checkpoint.catalog import open_checkpoint
from lightning_dist.checkpoint.storage import open_folder
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.test_checkpoint_use import writing
from tests.faults.fits import ending_of_fit
from tests.faults.test_checkpoint_failures import RaiseInStep, whole_in
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


def save_as_it_raises(context: RankContext, folder: str, parallel: str, raising: tuple[int, ...]) -> dict[str, Any]:
    """A fit that raises in its third batch; what is there as soon as it has ended."""
    keep = AsyncShardedCheckpoint(folder, save_on_exception=True, filename="{step}")
    strategy = DDPStrategy() if parallel == "lightning" else strategy_of(parallel=parallel)
    trainer = trainer_on_pool(context, strategy, callbacks=[keep], limit_val_batches=0, enable_checkpointing=True)
    never = threading.Event()
    with writing(lambda *_: never.wait(0.5) and None):  # longer than all else takes
        ending = ending_of_fit(trainer, RaiseInStep(raising))
    left = [each.name for each in threading.enumerate() if each.name.startswith("hierdist")]
    return {**ending, "there": whole_in(Path(folder)), "threads": left}


@pytest.mark.parametrize(
    ("parallel", "raising"),
    [
        ("lightning", (0, 1)),
        ("zero2", (0, 1)),
        ("ddp", (1,)),
        pytest.param("ddp", (0, 1), marks=pytest.mark.sweep),
        pytest.param("zero3", (1,), marks=pytest.mark.sweep),
    ],
)
def test_a_checkpoint_on_an_exception_is_whole_when_the_fit_has_ended(
    ranks: RankPool, tmp_path: Path, parallel: str, raising: tuple[int, ...]
) -> None:
    """One that raises alone too: the other learns of it, and saves the same step."""
    own = "InjectedError: the user's own"
    ended = ranks.run(
        save_as_it_raises, layout={"a": [0, 1]}, args=(str(tmp_path), parallel, raising), init_group=False, fresh=True
    )
    for rank, each in enumerate(ended):
        assert each["text"] == own if rank in raising else "rank 1 (host a)" in each["text"], each
        assert each["threads"] == []
    assert ended[0]["there"] == ["step=2.ckpt"]  # rank 0 commits
    manifest = open_checkpoint(open_folder(tmp_path / "step=2.ckpt"), full=True).manifest
    assert manifest.record["step"] == 2
    assert manifest.record["options"]["parallel"]["mode"] == ("ddp" if parallel == "lightning" else parallel)
    assert {entry.rank for entry in manifest.files.values()} == {0, 1}
