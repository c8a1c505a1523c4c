"""A save by the plan of the one before: what is read back, and what makes all ranks plan anew, or fail, alike."""

from __future__ import annotations

import pytest
import torch

from lightning_dist.checkpoint import sharded
from lightning_dist.checkpoint.catalog import survey
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.mirror import MemoryFolder
from lightning_dist.checkpoint.objects import encode
from lightning_dist.checkpoint.repeated import Repeatable, save_again
from lightning_dist.errors import CheckpointError
from tests.support.keepers import keeping
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


def save_twice(context: RankContext, name: str) -> list[str]:
    """Saves three times, and what became of each repetition."""
    import torch.distributed as dist

    keeper = client.find(name)
    assert keeper is not None
    root = KeptFolder([keeper])

    def state(number: int) -> dict[str, object]:
        own = f"rank/{context.rank}"
        return {"shared": torch.arange(7.0) + number, own: encode({"number": "x" * number}, own)}

    planned: list[Repeatable] = []
    first = MemoryFolder(KeptFolder([keeper], "a@1"))
    sharded.save(state(1), first, rank=context.rank, host="h", record={"step": 1}, remember=planned.append)

    def again(number: int, *, is_same: bool = True, fails: bool = False, step: int | None = None) -> str:
        def intact() -> None:
            if fails:
                raise CheckpointError("changed meanwhile")

        try:
            is_spread = save_again(
                planned[0],
                state(number),
                MemoryFolder(KeptFolder([keeper], f"a@{number}")),
                rank=context.rank,
                host="h",
                group=dist.group.WORLD,
                record={"step": number if step is None else step},
                is_same=is_same,
                intact=intact,
                written=lambda size: None,
                spread=lambda: context.rank != 0 or number != 20,
            )
        except CheckpointError as error:
            return str(error)
        return "anew" if is_spread is None else "whole" if is_spread else "not spread"

    last = context.rank == context.world_size - 1
    became = [again(20), again(3, is_same=not last), again(4, fails=last), again(5, step=50 + context.rank)]
    found = {entry.name: entry.problem for entry in survey(root, full=True)}
    became.append(", ".join(sorted(name for name, problem in found.items() if problem is None)))
    read = dict.fromkeys(["shared", f"rank/{context.rank}"])
    read["shared"] = torch.zeros(7)
    sharded.load(read, root.child("a@20"))
    assert torch.equal(read["shared"], torch.arange(7.0) + 20)
    assert read[f"rank/{context.rank}"] == {"number": "x" * 20}
    return became


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_repeated_save_is_a_save(ranks: RankPool, world_size: int) -> None:
    with keeping() as keeper:
        name = keeper.endpoint.name
        for whole, anew, failed, late, there in ranks.run(save_twice, world_size=world_size, args=(name,)):
            assert (whole, anew) == ("not spread", "anew")
            assert failed.endswith(f"failed on rank {world_size - 1}: CheckpointError: changed meanwhile")
            assert late.endswith("rank 1: its values are of step 51, rank 0's of 50" if world_size > 1 else "whole")
            assert there == ("a@1, a@20" if world_size > 1 else "a@1, a@20, a@5")
