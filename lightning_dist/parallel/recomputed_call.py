"""A stand-in for a block's ``forward`` that keeps the input and runs the block again in backward.

Note [Where it stands]
    The stand-in is an attribute of the block itself, so that no name in a ``state_dict`` changes, and hooks of the
    block (FSDP2's among them) run around it, once. A block compiled as a whole has two such places: around the
    compiled callable, or inside of it. Around, autograd's hooks see what the compiled graph keeps, so that it can be
    measured, and recomputation runs the compiled forward again. Inside, torch.compile traces the checkpoint, and its
    partitioner recomputes in the compiled backward; only there does a selective policy see single operations.

Note [Traced]
    A checkpoint that torch.compile traces needs no care for buffers: the graph's forward alone writes to them. If the
    trace breaks inside the block, torch runs the checkpoint as it is, uncompiled; so the care is taken in the function
    that is checkpointed, which decides when it runs, and not in the contexts, which are decided while tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from lightning_dist.parallel.activation_meter import ActivationMeter
from lightning_dist.parallel.module_tree import COMPILED
from lightning_dist.parallel.written_buffers import Snapshot, WrittenBuffers

Policy = Callable[..., Any]
"""Says of each operation whether its result is kept: the ``policy_fn`` of ``create_selective_checkpoint_contexts``."""


class RecomputedCall:
    """Stands in for the call of a block, from :meth:`install` to :meth:`release`.

    Args:
        block: The block; torch.compile's wrapper, if it has one.
        policy: What is kept; None to keep the input only.
        meter: Measures the block in its next passes.
    """

    def __init__(self, block: nn.Module, *, policy: Policy | None = None, meter: ActivationMeter | None = None) -> None:
        self._block = block
        self._owner, self._attribute = _place(block, inside=policy is not None)
        self._meter = meter
        self._buffers = WrittenBuffers(block)
        self._call: Callable[..., Any] = block.forward
        self._selective = None if policy is None else functools.partial(create_selective_checkpoint_contexts, policy)
        self._is_on = True
        self._replaced: dict[str, Any] = {}

    def install(self) -> None:
        """Take the place of the block's call; a stand-in that is there already is released first. Safe twice."""
        present = vars(self._owner).get(self._attribute)
        if present is self:
            return
        if isinstance(present, RecomputedCall):
            present.release()
        self._replaced = {name: value for name, value in vars(self._owner).items() if name == self._attribute}
        self._call = getattr(self._owner, self._attribute)
        vars(self._owner)[self._attribute] = self

    def release(self) -> None:
        """Put back what was there. Safe twice; forwards that ran before may still have their backward."""
        self._is_on = False  # something else may have taken the place and call this
        if vars(self._owner).get(self._attribute) is self:
            del vars(self._owner)[self._attribute]
            vars(self._owner).update(self._replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block's own call; in training, with gradients wanted, nothing but the arguments is kept."""
        if not (self._is_on and self._block.training and torch.is_grad_enabled()):
            return self._call(*args, **kwargs)
        # By position, since a checkpoint looks for the device whose random state it saves among these only.
        flat = (*args, *kwargs.values())
        call = functools.partial(_run, self._call, self._buffers, [], len(args), tuple(kwargs))
        if torch.compiler.is_compiling():
            if self._selective is None:
                return checkpoint(call, *flat, use_reentrant=False)
            return checkpoint(call, *flat, use_reentrant=False, context_fn=self._selective)
        context_fn = noop_context_fn if self._selective is None else self._selective
        if self._meter is not None:
            context_fn = functools.partial(_metered, self._meter, flat)
        return checkpoint(call, *flat, use_reentrant=False, preserve_rng_state=True, context_fn=context_fn)

    def stop_measuring(self) -> None:
        """Recompute without the meter from now on."""
        self._meter = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the model: they recompute too, with their own parameters, and are not measured."""
        return {**vars(self), "_meter": None}


def _run(
    call: Callable[..., Any],
    buffers: WrittenBuffers,
    snapshots: list[Snapshot],
    num_args: int,
    names: tuple[str, ...],
    *flat: Any,
) -> Any:
    """One forward, or a repetition of it: the forward leaves its snapshot in ``snapshots``."""
    args, kwargs = flat[:num_args], dict(zip(names, flat[num_args:], strict=True))
    if torch.compiler.is_compiling():
        return call(*args, **kwargs)
    if snapshots:
        try:
            with buffers.rewound(snapshots[0]):
                return call(*args, **kwargs)
        except RuntimeError as error:
            _explain_mutation(error)
            raise
    snapshot = buffers.snapshot()
    with buffers.watched(snapshot):
        result = call(*args, **kwargs)
    snapshots.append(snapshot)
    return result


def _explain_mutation(error: RuntimeError) -> None:
    """Put into the error of a selective checkpoint what to write, if it is the one about changed results."""
    if "Tensor cached during selective activation checkpoint has been mutated" in str(error):
        error.args = (
            "A block changes the result of a matrix product, attention or convolution in place (ReLU(inplace=True), "
            "add_), which recompute=selective has kept. Write it out of place, or use recompute=full. "
            f"The checkpoint said: {error}",
        )


def _metered(
    meter: ActivationMeter, arguments: tuple[Any, ...]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return meter.forward(arguments), _Again(meter.recomputation)


class _Again(AbstractContextManager[None]):
    """A context made anew at each entry: with a retained graph, there is a repetition for each backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._entered = self._make()
        self._entered.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.__exit__(kind, error, trace)


def _place(block: nn.Module, *, inside: bool) -> tuple[nn.Module, str]:
    """The module and its attribute to replace. See Note [Where it stands]."""
    compiled = block._modules.get(COMPILED)
    if compiled is not None:
        return (compiled if inside else block), "forward"
    if block._compiled_call_impl is not None and not inside:
        return block, "_compiled_call_impl"
    return block, "forward"
