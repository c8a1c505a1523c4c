"""A model made on the meta device takes the checkpoint it is resumed from, once it is sharded."""

from __future__ import annotations

import torch

from tests.distributed.lightning_runs import loader_of, make_batches, strategy_of, trainer_on_pool
from tests.distributed.test_sharded_training import Deferred, SaveAtEnd
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


def resume(context: RankContext, mode: str) -> list[list[float]]:
    """Losses of an epoch, of a second one resumed from it, and of two at once."""
    path = context.tmp_path / "half.ckpt"
    batches = make_batches(context.world_size, 3)[context.rank]
    losses = []
    for epochs, callbacks, ckpt_path in ((1, [SaveAtEnd(str(path))], None), (2, [], path), (2, [], None)):
        torch.manual_seed(5)
        module = Deferred()
        trainer = trainer_on_pool(context, strategy_of(parallel=mode), max_epochs=epochs, callbacks=callbacks)
        trainer.fit(module, loader_of(batches), ckpt_path=ckpt_path)
        losses.append(module.losses)
    return losses


def test_it_goes_on_exactly(ranks: RankPool) -> None:
    for _, resumed, straight in ranks.run(resume, layout={"a": [0], "b": [1]}, args=("zero3",), fresh=True):
        assert resumed == straight[3:]
