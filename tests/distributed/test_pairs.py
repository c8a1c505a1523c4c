"""Every two options of two groups of ``conf/`` train together, or are refused when they are composed, with a reason."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra import compose, initialize_config_module

from lightning_dist import config_store
from lightning_dist.errors import CombinationError
from lightning_dist.run_config import RunConfig
from tests.support.pairwise import Option, Pair, cover, pair
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

ROOT = Path(__file__).resolve().parents[2]
TWO_HOSTS = {"a": [0, 1], "b": [2, 3]}
ONE_HOST = {"a": [0, 1]}
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted((ROOT / "conf").iterdir())
    if folder.is_dir() and folder.name not in ("experiment", "__pycache__")
}

REFUSED: dict[Pair, str] = {
    pair(("model", "mlp"), ("data", "naive")): "write data=synthetic",
    pair(("model", "mlp"), ("data", "sharded")): "write data=synthetic",
    pair(("parallel", "tensor"), ("topology", "flat")): "write topology=auto",
    pair(("parallel", "pipeline"), ("recompute", "budget")): "write recompute=full",
    pair(("sync", "powersgd"), ("parallel", "tensor")): "write sync=bf16",
    pair(("sync", "powersgd"), ("parallel", "pipeline")): "write sync=int8",
    **{
        pair(("sync", "local_sgd"), ("parallel", mode)): "write parallel=ddp or zero2"
        for mode in GROUPS["parallel"]
        if mode not in ("ddp", "zero1", "zero2", "zero3")
    },
    **{pair(("sync", codec), ("parallel", "tensor")): "write sync=bf16" for codec in ("int8", "onebit", "topk")},
}
"""What does not go together, and what the error says."""

NEEDS: dict[Option, list[str]] = {  # what an option cannot do without, or what makes it small
    ("topology", "three_tier"): ["topology.switches={x: [a], y: [b]}"],
    ("recompute", "budget"): ["recompute.budget=64kB"],
    ("trainer", "gpu"): ["trainer.accelerator=cpu"],  # its precision is left
    ("model", "mlp"): ["model.n_layer=3", "model.n_features=8", "model.n_hidden=16"],
    **{
        ("model", name): ["model.n_layer=2", "model.n_embd=16", "model.n_head=2", "model.block_size=8"]
        for name in ("gpt-tiny", "gpt-small")
    },
}
SMALL = [
    *("trainer.max_steps=2", "trainer.devices=2", "trainer.val_check_interval=2"),
    *("trainer.num_sanity_val_steps=0", "trainer.limit_val_batches=1", "trainer.enable_progress_bar=false"),
    *("data.batch_size=2", "sample_bytes=0", "sync.timeout_s=20"),
]


def composed(options: dict[str, str], *overrides: str) -> RunConfig:
    needed = [override for option in options.items() for override in NEEDS.get(option, [])]
    config_store.register()
    with initialize_config_module("lightning_dist.conf", version_base="1.3"):
        chosen = [f"{group}={option}" for group, option in options.items()]
        return config_store.to_run_config(compose("train", overrides=[*chosen, *SMALL, *needed, *overrides]))


def train(context: RankContext, run: RunConfig) -> float:
    """The example's own training on this rank; the last loss on rank 0."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import train as example
    finally:
        sys.path.pop(0)
    shown: list[Any] = []
    with (
        mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="pairs"),
        mock.patch.object(example, "show", lambda run, trainer, learner, folder: shown.append(trainer)),
    ):
        example.train(run, context.tmp_path)
    if context.rank != 0:
        return 0.0
    (trainer,) = shown
    assert trainer.global_step == 2
    return float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("options", cover(GROUPS, REFUSED), ids=lambda options: "-".join(options.values()))
def test_options_train_together(ranks: RankPool, tmp_path: Path, options: dict[str, str]) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    text = [] if options["data"] == "synthetic" else [f"data.path={tmp_path}/text.txt"]
    # For these one host is nothing.
    crosses = options["topology"] == "three_tier" or options["sync"] not in ("flat", "hierarchical")
    layout = TWO_HOSTS if crosses else ONE_HOST
    own = [f"trainer.num_nodes={len(layout)}", f"monitor.history={tmp_path}/history"]
    run = composed(options, *text, *own)
    loss = ranks.run(train, layout=layout, args=(run,), deadline_s=60)[0]
    assert 0 < loss < 10


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: "-".join(sorted(option for _, option in refused)))
def test_what_does_not_go_together_is_refused_when_composed(refused: Pair) -> None:
    with pytest.raises(CombinationError, match=REFUSED[refused]):
        composed(dict(refused))
