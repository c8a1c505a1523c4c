"""Embeddings whose tables are elsewhere: which they are, and what their forward makes of rows that were looked up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everybody uses

Embedding = nn.Embedding | nn.EmbeddingBag
LookUp = Callable[[Tensor], Tensor]
"""[n, width], wanting gradients if anybody does, of [n] of int64: rows, ascending, each once."""


def tables_to_serve(module: nn.Module, *, above_bytes: int) -> dict[str, Embedding]:
    """Name -> embedding or bag, of those with sparse gradients that train and are larger than ``above_bytes``.

    One that bounds its rows' norms, or divides gradients by how often a row is used, needs the table whole; so does one
    that another module shares. They are left out, and so are bags of the maximum, which have no sparse gradients.
    """
    found: dict[str, Embedding] = {}
    holders: dict[Tensor, int] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            holders[parameter] = holders.get(parameter, 0) + 1
    for name, each in module.named_modules():
        if not isinstance(each, nn.Embedding | nn.EmbeddingBag) or type(each) not in (nn.Embedding, nn.EmbeddingBag):
            continue
        if each.sparse and each.weight.requires_grad and holders[each.weight] == 1:
            fits = each.max_norm is None and not each.scale_grad_by_freq and getattr(each, "mode", None) != "max"
            if fits and each.weight.numel() * each.weight.element_size() > above_bytes:
                found[name] = each
    return found


def forward_of(module: Embedding, num_rows: int, look_up: LookUp) -> Callable[..., Tensor]:
    """What stands in for a module's ``forward``.

    Args:
        module: Whose options count, but not its weight.
        num_rows: Of the whole table.
        look_up: Gives the values of rows.
    """

    def looked_up(ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """(where each id's row is, the rows, where that of the padding is)."""
        rows, places = torch.unique(ids.to(torch.int64), return_inverse=True)
        check_rows(rows, num_rows)
        found = None if module.padding_idx is None else (rows == module.padding_idx).nonzero()[:, 0]
        padding = None if found is None or not found.numel() else int(found[0])
        return places, look_up(rows), padding

    def embedding(ids: Tensor) -> Tensor:
        """See :meth:`torch.nn.Embedding.forward`."""
        places, values, padding = looked_up(ids)
        return F.embedding(places, values, padding_idx=padding)

    def bag(input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:  # noqa: A002  # the names of torch
        """See :meth:`torch.nn.EmbeddingBag.forward`."""
        assert isinstance(module, nn.EmbeddingBag)
        places, values, padding = looked_up(input)
        return F.embedding_bag(
            places,
            values,
            None if offsets is None else offsets.to(torch.int64),
            mode=module.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )

    return bag if isinstance(module, nn.EmbeddingBag) else embedding


def check_rows(rows: Tensor, num_rows: int) -> None:
    """Refuse ids that are no rows.

    Args:
        rows: Ascending.
        num_rows: Of the table.

    Raises:
        IndexError: One is none.
    """
    if rows.numel() and not 0 <= int(rows[0]) <= int(rows[-1]) < num_rows:
        raise IndexError(f"ids from {int(rows[0])} to {int(rows[-1])} of a table of {num_rows} rows")
