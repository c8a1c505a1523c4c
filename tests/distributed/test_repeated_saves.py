"""A save by the plan of the one before: what is read back, and what makes all ranks plan anew, or fail, alike."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from lightning_dist.checkpoint import sharded
from lightning_dist.checkpoint.catalog import survey
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.keeper.client import Line
from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.kept_save import KeptSave, Lines
from lightning_dist.checkpoint.mirror import MemoryFolder
from lightning_dist.checkpoint.objects import encode
from lightning_dist.checkpoint.rate import RateLimit
from lightning_dist.checkpoint.repeated import Repeatable, Repeater
from lightning_dist.errors import CheckpointError
from tests.support.keepers import keeping
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


def save_thrice(context: RankContext, name: str) -> list[str]:
    """Saves, and what became of each repetition."""
    import torch.distributed as dist

    keeper = client.find(name)
    assert keeper is not None
    root = KeptFolder([keeper])

    def state(number: int) -> dict[str, object]:
        own = f"rank/{context.rank}"
        return {
            "shared": torch.arange(7.0) + number,
            "100%": torch.arange(3) + number,
            own: encode({"number": "x" * number}, own),
        }

    planned: list[Repeatable] = []
    first = MemoryFolder(KeptFolder([keeper], "a@1"))
    sharded.save(state(1), first, rank=context.rank, host="h", record={"step": 1}, remember=planned.append)
    repeater = Repeater(planned[0], rank=context.rank, group=dist.group.WORLD)
    buddy = Line(keeper)
    lines = Lines((Line(keeper), buddy), buddy, rate=RateLimit(None), part_bytes=16)

    def again(number: int, *, is_same: bool = True, fails: bool = False, step: int | None = None) -> str:
        def intact() -> None:
            if fails:
                raise CheckpointError("changed meanwhile")

        kept = KeptSave(lines, f"a@{number}")
        try:
            with patch.object(kept, "spread", lambda name: False) if number == 20 else nullcontext():
                is_spread = repeater.save(
                    state(number),
                    kept,
                    record={"step": number if step is None else step, "100%": "%d"},
                    is_same=is_same,
                    intact=intact,
                    written=lambda size: None,
                )
        except CheckpointError as error:
            return str(error)
        return "anew" if is_spread is None else "whole" if is_spread else "not spread"

    def there() -> str:
        dist.barrier()
        found = {entry.name: entry.problem for entry in survey(root, full=True)}
        dist.barrier()
        return ", ".join(sorted(name for name, problem in found.items() if problem is None))

    last = context.rank == context.world_size - 1
    became = [again(20), there()]
    read = dict.fromkeys(["shared", "100%", f"rank/{context.rank}"])
    read["shared"], read["100%"] = torch.zeros(7), torch.zeros(3, dtype=torch.int64)
    sharded.load(read, root.child("a@20"))
    assert torch.equal(read["shared"], torch.arange(7.0) + 20)
    assert torch.equal(read["100%"], torch.arange(3) + 20)
    assert read[f"rank/{context.rank}"] == {"number": "x" * 20}
    became += [again(3, is_same=not last), again(4, fails=last), again(5, step=50 + context.rank), there()]
    for number in (6, 7, 8):  # memory takes turns
        became += [again(number), there()]
    lines.close()
    return became


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_repeated_save_is_a_save(ranks: RankPool, world_size: int) -> None:
    with keeping() as keeper:
        name = keeper.endpoint.name
        for not_spread, both, anew, failed, late, later, *rest in ranks.run(
            save_thrice, world_size=world_size, args=(name,)
        ):
            assert (not_spread, anew, both) == ("not spread", "anew", "a@1, a@20")
            assert failed.endswith(f"failed on rank {world_size - 1}: CheckpointError: changed meanwhile")
            assert late.endswith("rank 1's values are of step 51, rank 0's of 50" if world_size > 1 else "whole")
            assert later == ("a@1, a@20" if world_size > 1 else "a@5")
            assert rest == ["whole", "a@6", "whole", "a@7", "whole", "a@8"]
