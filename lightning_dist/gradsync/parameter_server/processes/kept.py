"""A table's rows in a server process, with what the optimizer keeps for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.gradsync.parameter_server.processes import optimizers
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.sparse.rows import Rows, Table, to_sparse

VALUES = "values"
"""Name of the rows themselves among the entries of a table; an optimizer's are behind :data:`STATE`."""
STATE = "state."


@dataclass(frozen=True)
class Stepper:
    """Which optimizer steps a table.

    Attributes:
        name: Of :data:`~lightning_dist.gradsync.parameter_server.processes.optimizers.KINDS`.
        options: Of its parameter group, with the present learning rate.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """All of a table's rows at a moment.

    Attributes:
        version: So many steps have made them.
        entries: Name -> tensor or number.
        stepper: ``None``: no optimizer is known yet.
    """

    version: int
    entries: Mapping[str, Any]
    stepper: Stepper | None


class KeptTable:
    """Rows that one rank steps, and all look up.

    Args:
        num_rows: Of this rank's share.
        table: Of which they are a part.
        timeout_s: Deadline of each wait, in seconds.
    """

    def __init__(self, num_rows: int, table: Table, *, timeout_s: float) -> None:
        self._own = Table((num_rows, *table.row_shape), table.dtype)
        self._parameter = nn.Parameter(torch.zeros(self._own.shape, dtype=table.dtype))
        self._timeout_s = timeout_s
        self._optimizer: torch.optim.Optimizer | None = None
        self._stepper: Stepper | None = None
        self._version = 0
        self._lock = threading.Lock()
        self._no_rows = Rows(torch.empty(0, dtype=torch.int64), torch.empty((0, *table.row_shape), dtype=table.dtype))
        self.shard = self._shard_from(0)

    @property
    def own(self) -> Table:
        """What its rows are like."""
        return self._own

    def step(self, version: int, rows: Rows | None, stepper: Stepper | None) -> int:
        """Make the step that leads to a version; nothing if it is there. The version that is there then.

        Args:
            version: What is reached.
            rows: Gradients; ``None``: nothing changes, since the step was left out.
            stepper: By what, if there are rows.
        """
        with self._lock:
            if version <= self._version:
                return self._version  # whoever lost the connection says it again
            while self._version < version:
                is_last = rows is not None and self._version == version - 1
                self._pass(rows if is_last and rows is not None else self._no_rows, stepper if is_last else None)
            return self._version

    def prepare(self, stepper: Stepper) -> None:
        """Have an optimizer from the beginning; one that is there already stays."""
        with self._lock:
            if self._stepper is None or self._stepper.name != stepper.name:
                self._make(stepper)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Contents]:
        """All that is here, as it is; no step is made meanwhile."""
        with self._lock:
            entries: dict[str, Any] = {VALUES: self._parameter.data}
            if self._optimizer is not None:
                for name, value in self._optimizer.state[self._parameter].items():
                    entries[STATE + name] = value.to_dense() if isinstance(value, Tensor) and value.is_sparse else value
            yield Contents(self._version, entries, self._stepper)

    def write(self, entries: Mapping[str, Any], stepper: Stepper | None) -> None:
        """Put entries in the place of those that are here; what is not among them stays, but for an optimizer's."""
        with self._lock:
            values = entries.get(VALUES)
            if values is not None:
                self._parameter.data.copy_(values)
            if stepper is not None:
                self._make(stepper)
                state = {name.removeprefix(STATE): value for name, value in entries.items() if name != VALUES}
                if state:
                    assert self._optimizer is not None, "just made"
                    self._optimizer.state[self._parameter] = state

    def restore(self, contents: Contents) -> None:
        """Begin with what another copy has; before anybody asks."""
        self.write(contents.entries, contents.stepper)
        self._version = contents.version
        self.shard = self._shard_from(contents.version)

    def _pass(self, rows: Rows, stepper: Stepper | None = None) -> None:
        """One step, as whoever owns the shard makes it."""
        self.shard.push(0, self._version, rows, {})
        gradient = self.shard.collect()
        if stepper is not None:
            if self._stepper is None or self._stepper.name != stepper.name:
                self._make(stepper)
            assert self._optimizer is not None, "just made"
            self._stepper = stepper
            self._optimizer.param_groups[0].update(stepper.options)
            self._parameter.grad = to_sparse(gradient, self._own)
            self._optimizer.step()
            self._parameter.grad = None
        self._version += 1
        self.shard.publish(self._version)

    def _make(self, stepper: Stepper) -> None:
        self._optimizer = optimizers.made(stepper.name, self._parameter, stepper.options)
        self._stepper = stepper

    def _shard_from(self, version: int) -> Shard:
        return Shard(
            self._parameter.data, num_ranks=1, timeout_s=self._timeout_s, alarm=lambda _: None, version=version
        )
