"""Local SGD in checkpoints: what is common to all workers, and what each has of its own.

Besides what other checkpoints hold (:mod:`~lightning_dist.modes.checkpoints`), whose ``model/<name>`` are outer weights
and whose ``optimizer/`` is that of worker 0:

- ``local/<w>/model/<name>``: worker w's own weights and buffers, of what has trained;
- ``local/<w>/optimizer/<i>/...``: the state of its optimizers, of all workers but 0;
- ``outer/momentum/<name>``: of the outer optimizer;
- ``outer/mean/<name>``: means that had arrived and were not applied.

As many workers go on with what was theirs. Others begin with the outer weights, worker 0's optimizer and the outer
momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dist.build import to_read
from lightning_dist.checkpoint import sharded
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.gradsync.local_sgd import LocalSGD
from lightning_dist.parallel.held_state import HeldState, HeldTensor, Stored, local_of
from lightning_dist.parallel.held_tensors import HeldTensors

RECORD = "local_sgd"
"""Of a checkpoint's record: where workers are."""
MOMENTUM, MEAN = "outer/momentum/", "outer/mean/"


class OwnState(NamedTuple):
    """Where a checkpoint has the optimizers of this rank's worker.

    Attributes:
        root: What names of their tensors begin with, before what they else do.
        ranks: Those of the worker when it was saved, whose other values count; ``None``: all ranks'.
    """

    root: str
    ranks: tuple[int, ...] | None


class LocalState:
    """Saves and loads, for a mode.

    Args:
        local: The scheme.
        module: The user's.
        shown: Name of a parameter or buffer, this rank's values -> what a ``state_dict()`` of this rank has.
    """

    def __init__(self, local: LocalSGD, module: nn.Module, shown: Callable[[str, Tensor], Tensor]) -> None:
        self._local = local
        self._module = module
        self._shown = shown
        self._own, self._momentum = HeldTensors(), HeldTensors()
        self._last: tuple[list[HeldTensor], ...] | None = None
        self._all: list[HeldTensor] = []

    @property
    def is_apart(self) -> bool:
        """Whether workers have weights of their own."""
        return self._local.weights.has_begun

    @property
    def root(self) -> str:
        """What names of this worker's own tensors begin with."""
        return root_of(self._local.workers.index)

    def record(self) -> dict[str, Any]:
        """For the checkpoint's record."""
        return {RECORD: {**self._local.record(), "is_apart": self.is_apart}}

    def outer_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A ``state_dict()`` of this rank with outer values."""
        copies = self._local.weights.copies
        first = _first_names(self._module)
        return {
            name: self._shown(first[name], copies[first[name]]) if first.get(name) in copies else value
            for name, value in state.items()
        }

    def held(
        self,
        known: HeldTensors,
        held: Callable[[], HeldState],
        model: Mapping[str, Any],
        optimizers: Sequence[torch.optim.Optimizer],
        states: Sequence[Mapping[str, Any]],
        prefixes: Callable[[int | None], str],
    ) -> list[HeldTensor]:
        """All tensors of a save; waits for what is on its way. See :meth:`HeldTensors.of`, with the same arguments."""
        self._local.settle()
        weights, workers = self._local.weights, self._local.workers
        if not states:  # for export
            return known.of(held, self.outer_of(model), optimizers, states, prefixes=prefixes)

        def of_worker(optimizer: int | None) -> str:
            is_own = optimizer is not None and workers.index > 0
            return f"{self.root}{prefixes(optimizer)}" if is_own else prefixes(optimizer)

        common = known.of(held, self.outer_of(model), optimizers, states, prefixes=of_worker)
        own = self._own.of(
            lambda: held().among(workers.own, model=True),
            {name: self._shown(name, weights.kept(name)) for name in weights.copies},
            (),
            (),
            prefixes=lambda _: f"{self.root}{prefixes(None)}",
        )
        momentum = self._momentum.of(held, self._shown_all(weights.momentum), (), (), prefixes=lambda _: MOMENTUM)
        means = {name: mean for sent in self._local.in_flight for name, mean in sent.means.items()}
        described = (common, own, momentum)
        if self._last is None or any(a is not b for a, b in zip(self._last, described, strict=True)):
            self._last = described
            # Means change weights, too, when they arrive: nothing of these may be copied late.
            self._all = [*common, *(replace(each, steady=()) for each in own), *momentum]
        if not means:
            return self._all  # the same list, if nothing but values has changed
        arrived = held().of_model(self._shown_all(means))
        return [*self._all, *(replace(each, names=(f"{MEAN}{each.names[0]}",)) for each in arrived)]

    def _shown_all(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._shown(name, value) for name, value in values.items()}

    # -- loading ------------------------------------------------------------------------------------------------------

    def own_of(self, manifest: Manifest) -> OwnState:
        """Where this worker's optimizers are: worker 0's, if others train apart now than did."""
        record, workers = manifest.record.get(RECORD), self._local.workers
        if record is None or not record["is_apart"]:
            return OwnState("", None)
        index = workers.index if goes_on(manifest, len(workers.parts)) else 0
        return OwnState(root_of(index) if index else "", tuple(record["workers"][index]))

    def load(self, folder: Folder, manifest: Manifest, held: HeldState, prefix: str) -> bool:
        """Go on where a checkpoint was saved; every rank calls it, once outer weights are in the module.

        Args:
            folder: Of the checkpoint.
            manifest: Of the checkpoint.
            held: Of the module.
            prefix: What names of the model's tensors begin with.

        Returns:
            Whether the checkpoint says how many steps were made.
        """
        self._local.forget()
        record = manifest.record.get(RECORD)
        if record is None:
            return False
        if not record["is_apart"]:
            self._local.step = record["step"]
            return True
        same = goes_on(manifest, len(self._local.workers.parts))
        own = self._read(folder, manifest, held, f"{self.root}{prefix}") if same else {}
        means = self._read(folder, manifest, held, MEAN) if same else {}
        self._local.weights.take(own, self._read(folder, manifest, held, MOMENTUM))
        self._local.take(record if same else {**record, "in_flight": []}, means)
        return True

    def _read(self, folder: Folder, manifest: Manifest, held: HeldState, prefix: str) -> dict[str, Tensor]:
        """This rank's values of what is stored under names that begin so."""
        stored = {
            name.removeprefix(prefix): Stored(entry.shape, getattr(torch, entry.dtype))
            for name, entry in manifest.tensors.items()
            if name.startswith(prefix)
        }
        present = {name for name, _ in _named_tensors(self._module)}
        to_fill = list(held.model_to_fill({name: each for name, each in stored.items() if name in present}))
        state = {f"{prefix}{each.name}": to_read(replace(each, name=f"{prefix}{each.name}")) for each in to_fill}
        sharded.load(dict(state), folder, manifest=manifest)
        return {each.name: local_of(each.value()) for each in to_fill}


def root_of(worker: int) -> str:
    """What names of a worker's own tensors begin with."""
    return f"local/{worker}/"


def goes_on(manifest: Manifest, workers: int) -> bool:
    """Whether as many workers train as have saved a checkpoint apart."""
    record = manifest.record.get(RECORD)
    return record is not None and record["is_apart"] and len(record["workers"]) == workers


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _first_names(module: nn.Module) -> dict[str, str]:
    """Name of a parameter or buffer -> the first of its names."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in _named_tensors(module)}
