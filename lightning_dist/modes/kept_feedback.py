"""Error feedback in sharded checkpoints: ``feedback/<r>``, what rank r owes of which parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist.checkpoint import sharded
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.modes.mode import Mode

FEEDBACK = "feedback/"
WINDOW = "feedback_window"
"""Of a checkpoint's record: how many times gradients had been synchronised."""


def warn_of_lost_feedback(mode: Mode) -> None:
    """Say that a file for all ranks does not hold what is owed, if anything is."""
    sync = mode.setting.sync
    if mode.feedback is not None and mode.feedback.loses and sync.error_feedback:
        scheme = "sync=powersgd" if sync.algorithm == "powersgd" else f"sync.codec={sync.codec}"
        rank_zero_warn(
            f"checkpoint=full does not hold what {scheme} has lost and is to send still: a run that goes on from it "
            "has lost it for good; write checkpoint=sharded or checkpoint=async_sharded"
        )


def warn_of_second_momentum(mode: Mode, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Say that an optimizer takes momentum, too, of what has its momentum already."""
    sync = mode.setting.sync
    if not sync.momentum_correction or sync.codec != "topk" or mode.feedback is None:
        return
    for optimizer in optimizers:
        if any(group.get("momentum") or "betas" in group for group in optimizer.param_groups):
            rank_zero_warn(
                f"sync.momentum_correction={sync.momentum_correction:g} and {type(optimizer).__name__} both take "
                "momentum of gradients: write torch.optim.SGD(..., momentum=0), or sync.momentum_correction=0"
            )


def load_feedback(folder: Folder, manifest: Manifest, mode: Mode, held: Collection[str]) -> None:
    """Take over what is owed; every rank calls it.

    As many ranks that hold the same as those that saved go on with what was theirs, to the bit. Others deal it out: of
    each parameter each of the former ranks has one rank that takes over what it owed.

    Args:
        folder: Of the checkpoint.
        manifest: Of the checkpoint.
        mode: The present one.
        held: Names of the parameters that this rank holds, in part at least.
    """
    feedback = mode.feedback
    saved = [name for name in manifest.objects if name.startswith(FEEDBACK)]
    if not saved:
        return
    if feedback is None:
        rank_zero_warn(
            "the checkpoint holds what its run has lost of gradients and was to send still, and this run, which loses "
            f"nothing (sync.codec={mode.setting.sync.codec}), does not take it over: to have it applied, go on for a "
            "step with the sync of before"
        )
        return
    window, run = manifest.record.get(WINDOW) or 0, mode.setting.run
    own = f"{FEEDBACK}{run.rank}"
    if len(saved) == run.cluster.world_size and own in saved:
        state: dict[str, Any] = {own: None}
        sharded.load(state, folder, manifest=manifest)
        if state[own]["layout"] == feedback.layout:
            feedback.load_state_dicts([state[own]], run.device)
            return
    place, size = mode.feedback_seat
    taken: dict[str, Any] = {name: None for name in saved if int(name.removeprefix(FEEDBACK)) % size == place}
    sharded.load(taken, folder, manifest=manifest)
    feedback.load_state_dicts(list(taken.values()), run.device, window=window)
    feedback.keep_only(held)
