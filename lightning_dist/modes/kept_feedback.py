"""Error feedback in sharded checkpoints: ``feedback/<r>`` says what rank r owes, ``feedback/<r>/values`` how much."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist import build
from lightning_dist.checkpoint import sharded
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.comm.feedback import Feedback
from lightning_dist.modes.feedback_tensors import joined, parted
from lightning_dist.modes.mode import Mode
from lightning_dist.parallel.held_state import HeldTensor

FEEDBACK = "feedback/"
WINDOW = "feedback_window"
"""Of a checkpoint's record: how many times gradients had been synchronised."""


_VALUES = "/values"


def kept_feedback(feedback: Feedback, rank: int) -> tuple[dict[str, Any], list[HeldTensor]]:
    """What this rank owes, for a checkpoint: an object, and tensors whose values change with the next step."""
    return parted(feedback.state_dict(), f"{FEEDBACK}{rank}{_VALUES}", rank=rank)


def warn_of_lost_feedback(mode: Mode) -> None:
    """Say that a file for all ranks does not hold what is owed, if anything is."""
    sync = mode.setting.sync
    if mode.feedback is not None and mode.feedback.loses and sync.error_feedback:
        scheme = "sync=powersgd" if sync.algorithm == "powersgd" else f"sync.codec={sync.codec}"
        rank_zero_warn(
            f"checkpoint=full does not hold what {scheme} has lost and is to send still: a run that goes on from it "
            "has lost it for good; write checkpoint=sharded or checkpoint=async_sharded"
        )


def warn_of_lost_workers(mode: Mode) -> None:
    """Say that a file for all ranks does not hold what each worker has of its own, where workers train apart."""
    if mode.local_state is not None and mode.local_state.is_apart:
        rank_zero_warn(
            "checkpoint=full holds the outer weights and the optimizers of the first host only: with sync=local_sgd a "
            "run that goes on from it lets all hosts begin there, without outer momentum; write checkpoint=sharded or "
            "checkpoint=async_sharded"
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


def follow_scale(mode: Mode) -> None:
    """What is owed follows the scale of gradients, where a scaler of the precision plugin changes it."""
    scaler = getattr(mode.setting.precision, "scaler", None)
    if mode.feedback is not None and scaler is not None:
        mode.feedback.scale_of = lambda: scaler._scale  # get_scale() would wait for the device


def forget_feedback(mode: Mode) -> None:
    """Nothing is owed: the state that training goes on from is not that of the gradients so far.

    A search of a learning rate or a batch size goes back to where it began, inside of a fit.
    """
    mode.forget()
    if mode.feedback is not None:
        mode.feedback.load_state_dicts([], mode.setting.run.device)


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
        forget_feedback(mode)
        return
    if feedback is None:
        feedback = build.handed_on(mode.setting.run)
        if not mode.hand_on(feedback):
            rank_zero_warn(
                "the checkpoint holds what its run has lost of gradients and was to send still, and parallel="
                f"{mode.setting.parallel.mode} with sync.algorithm={mode.setting.sync.algorithm} and "
                f"sync.codec={mode.setting.sync.codec} does not take it over: to have it applied, go on for a step "
                "with the sync of before"
            )
            return
        follow_scale(mode)
    window, run = manifest.record.get(WINDOW) or 0, mode.setting.run
    own = f"{FEEDBACK}{run.rank}"
    if len(saved) == run.cluster.world_size and own in saved:
        (state,) = _read([own], folder, manifest)
        if state["layout"] == feedback.layout:
            feedback.load_state_dicts([state], run.device)
            return
    place, size = mode.feedback_seat
    taken = _read([name for name in saved if int(name.removeprefix(FEEDBACK)) % size == place], folder, manifest)
    states = [state for state in taken if build.can_take_over(state["layout"], feedback.layout)]
    if len(states) < len(taken):
        rank_zero_warn(
            "the checkpoint holds what its run was to send still, of weights that hosts had gone by themselves "
            "(sync=local_sgd) or of gradients: this run sends something else, and leaves it out"
        )
    feedback.load_state_dicts(states, run.device, window=window)
    feedback.keep_only(held)


def _read(names: Sequence[str], folder: Folder, manifest: Manifest) -> list[dict[str, Any]]:
    """The states of some ranks; every rank calls it."""
    state: dict[str, Any] = dict.fromkeys(names)
    tensors = {name: manifest.tensors[name + _VALUES] for name in names if name + _VALUES in manifest.tensors}
    state |= {name + _VALUES: torch.empty(tensor.shape) for name, tensor in tensors.items()}
    sharded.load(state, folder, manifest=manifest)
    return [joined(state[name], state.get(name + _VALUES)) for name in names]
