"""Embeddings of a module whose tables are dealt to the ranks, each of which serves and trains the rows that it has.

The parameter stays the same object and holds this rank's rows; so the user's optimizer, learning rates and all, steps
each row where it is. ``forward`` looks up the rows of its ids, each once, wherever they are; their gradients wait until
the window's backward passes are over, then go to the servers, which take the mean over ranks.

The sequence of calls, on every rank: :meth:`ServedTables.publish` when a step is over; any number of forwards, as many
as a rank likes; :meth:`ServedTables.exchange` when gradients are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everybody uses

from lightning_dist.gradsync.parameter_server.client import RowClient, ServedTable
from lightning_dist.gradsync.parameter_server.placement import Placement
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.sparse.rows import Rows, Table, merged, to_sparse


def tables_to_serve(module: nn.Module, *, above_bytes: int) -> dict[str, nn.Embedding]:
    """Name -> embedding, of those with sparse gradients that train and are larger than ``above_bytes``.

    One that bounds its rows' norms, or divides gradients by how often a row is used, needs the table whole; so does one
    that another module shares. They are left out.
    """
    found: dict[str, nn.Embedding] = {}
    holders: dict[Tensor, int] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            holders[parameter] = holders.get(parameter, 0) + 1
    for name, each in module.named_modules():
        if type(each) is nn.Embedding and each.sparse and each.weight.requires_grad and holders[each.weight] == 1:
            fits = each.max_norm is None and not each.scale_grad_by_freq
            if fits and each.weight.numel() * each.weight.element_size() > above_bytes:
                found[name] = each
    return found


@dataclass
class _Used:
    """A table and what this rank has looked up since the last exchange.

    Attributes:
        module: Whose forward it serves.
        served: How it is dealt.
        looked_up: (rows, their values with gradients) of each forward.
        gradients: Of backward passes that are over.
    """

    module: nn.Embedding
    served: ServedTable
    looked_up: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    gradients: list[Rows] = field(default_factory=list)

    def settle(self) -> None:
        """A backward is over: keep its gradients, and let go what it has looked up."""
        for rows, values in self.looked_up:
            if values.grad is not None:
                self.gradients.append(Rows(rows, values.grad))
        self.looked_up = []


class ServedTables:
    """The served embeddings of a module; every rank makes it, and cuts the same tables.

    Args:
        embeddings: Name -> module, whole; the same on all ranks.
        rank: This one.
        num_ranks: All serve.
        make_shard: Makes of values a :class:`Shard`.
        operation: Opens the seam around what waits for other ranks, given its name.
    """

    def __init__(
        self,
        embeddings: Mapping[str, nn.Embedding],
        *,
        rank: int,
        num_ranks: int,
        make_shard: Callable[[Tensor], Shard],
        operation: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._operation = operation
        self._num_ranks = num_ranks
        self._client: RowClient | None = None
        self._version = 0
        self._used: dict[str, _Used] = {}
        for number, (name, module) in enumerate(embeddings.items()):
            whole = module.weight.data
            placement = Placement.of(len(whole), num_ranks)
            module.weight.data = whole[placement.rows_of(rank)]
            table = Table(tuple(whole.shape), whole.dtype)
            served = ServedTable(number, table, placement, make_shard(module.weight.data))
            self._used[name] = used = _Used(module, served)
            module.forward = _forward_of(self, used)  # type: ignore[method-assign, assignment]  # until release

    @property
    def tables(self) -> dict[str, ServedTable]:
        """By name of the embedding."""
        return {name: used.served for name, used in self._used.items()}

    @property
    def by_parameter(self) -> dict[Tensor, ServedTable]:
        """The same by what is left of the weight."""
        return {used.module.weight: used.served for used in self._used.values()}

    def connect(self, client: RowClient) -> None:
        """From now on rows of other ranks can be looked up."""
        self._client = client

    def publish(self, parameters: Container[Tensor] | None = None) -> None:
        """What steps were to be made has been made: others may look at this rank's rows.

        Args:
            parameters: Which tables these are true of; all, if not given.
        """
        for used in self._used.values():
            if parameters is None or used.module.weight in parameters:
                used.served.own.publish(self._version)

    def look_up(self, used: _Used, rows: Tensor) -> Tensor:
        """[n, width]: some rows, each asked for once, as the last step has left them."""
        assert self._client is not None, "it is connected before the first batch"
        self.publish()
        with self._operation("look-up of rows"):
            return self._client.pull(used.served, rows, version=self._version)

    def settle(self) -> None:
        """A backward is over whose gradients are not exchanged yet."""
        for used in self._used.values():
            used.settle()

    @torch.no_grad()
    def exchange(self) -> None:
        """Give the gradients to who has the rows, and take the mean of those that this rank has; every rank calls it.

        Each parameter's ``grad`` is then sparse, with the rows that any rank has used.
        """
        self.publish()
        self.settle()
        with self._operation("exchange of rows"):
            self._push_and_collect()
        self._version += 1

    def _push_and_collect(self) -> None:
        assert self._client is not None, "it is connected before the first batch"
        for used in self._used.values():
            no_values = used.module.weight.new_empty((0, *used.served.table.row_shape))
            empty = Rows(torch.empty(0, dtype=torch.int64), no_values)
            self._client.push(used.served, merged([empty, *used.gradients]))
            used.gradients = []
        for used in self._used.values():
            total = used.served.own.collect()
            weight = used.module.weight
            mean = Rows(total.indices, total.values / self._num_ranks)
            weight.grad = to_sparse(mean, Table(tuple(weight.shape), weight.dtype))

    def release(self, whole: Mapping[str, Tensor] | None) -> None:
        """Make the embeddings plain again. Safe to call twice.

        Args:
            whole: Name -> the whole table; ``None`` if it could not be had: it is NaN then.
        """
        for name, used in self._used.items():
            weight = used.module.weight
            lost = weight.new_full((1,), torch.nan).expand(used.served.table.shape)
            weight.data = lost.clone() if whole is None else whole[name]
            weight.grad = None
            del used.module.forward
        self._used = {}


def _forward_of(tables: ServedTables, used: _Used) -> Callable[[Tensor], Tensor]:
    def forward(ids: Tensor) -> Tensor:
        """See :meth:`torch.nn.Embedding.forward`."""
        rows, places = torch.unique(ids.to(torch.int64), return_inverse=True)
        if rows.numel() and not 0 <= int(rows[0]) <= int(rows[-1]) < used.served.table.num_rows:
            size = used.served.table.num_rows
            raise IndexError(f"ids from {int(rows[0])} to {int(rows[-1])} of a table of {size} rows")
        values = tables.look_up(used, rows)
        padding = used.module.padding_idx
        if torch.is_grad_enabled() and used.module.weight.requires_grad:
            values.requires_grad_()
            used.looked_up.append((rows, values))
        if padding is None or not (rows == padding).any():
            return F.embedding(places, values)
        return F.embedding(places, values, padding_idx=int((rows == padding).nonzero()[0, 0]))

    return forward
