"""The whole of a model that is cut into stages: parameters, buffers and optimizer states come from where they are."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.parallel.full_tensors import without_memory

_CHUNK_BYTES = 64 << 20


class StageGather:
    """Brings tensors from the rank of a pipeline that holds them to its others; every rank of the pipeline makes it.

    Args:
        pipeline: The ranks of the pipeline, in order.
        collectives: The seam.
        device: What the backend takes.
    """

    def __init__(self, pipeline: RankGroup, collectives: Collectives, device: torch.device) -> None:
        self._pipeline = pipeline
        self._collectives = collectives
        self._device = device

    def _operation(self, name: str) -> AbstractContextManager[None]:
        return self._collectives.operation(name, self._pipeline)

    @property
    def position(self) -> int:
        """This rank's place in the pipeline."""
        return self._pipeline.index

    def fill(self, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Give every rank the values of the rank that holds them; collective.

        Args:
            tensors: (place of the holder, tensor with memory), in the same order on every rank.
        """
        for owner, some in self._in_chunks(tensors):
            with self._operation("gather of pipeline stages"):
                dist._broadcast_coalesced(self._group, some, _CHUNK_BYTES, self._number(owner))

    def gather(self, tensors: Iterable[tuple[int, Tensor]], *, keep: bool) -> list[Tensor]:
        """Copies of the tensors as their holders have them, in CPU memory; collective.

        Args:
            tensors: (place of the holder, tensor, on other ranks one of the same shape and type), in the same order;
                asked for as they are sent.
            keep: Whether this rank wants the values; else it gets tensors without memory.
        """
        found: list[Tensor] = []
        for owner, some in self._in_chunks(tensors):
            is_own = owner == self.position
            moved = [t.detach().to(self._device).contiguous() if is_own else self._empty(t) for t in some]
            with self._operation("gather of pipeline stages"):
                dist._broadcast_coalesced(self._group, moved, _CHUNK_BYTES, self._number(owner))
            found += [t.cpu() if keep else without_memory(t.cpu()) for t in moved]
        return found

    def exchange(self, said: Any) -> list[Any]:
        """What each rank of the pipeline says, in order; collective."""
        heard: list[Any] = [None] * self._pipeline.size
        with self._operation("exchange between pipeline stages"):
            dist.all_gather_object(heard, said, group=self._pipeline.process_group)
        return [heard[self._number(position)] for position in range(self._pipeline.size)]

    def tell(self, said: Any, *, teller: int) -> Any:
        """What one rank of the pipeline says to all; collective."""
        source, is_own = self._pipeline.ranks[teller], teller == self.position
        payload = pickle.dumps(said) if is_own else b""
        size = torch.tensor([len(payload)], device=self._device)
        self._collectives.broadcast(size, self._pipeline, source=source)
        if is_own:
            values = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device)
        else:
            values = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._collectives.broadcast(values, self._pipeline, source=source)
        return said if is_own else pickle.loads(values.cpu().numpy().tobytes())  # noqa: S301  # a rank of this run's

    def optimizer_state(
        self,
        state: Mapping[str, Any],
        *,
        keep: bool,
        whole: Callable[[int, Tensor], Tensor] = lambda index, value: value,
    ) -> dict[str, Any]:
        """An optimizer's ``state_dict()`` with the entries of all stages; collective.

        Args:
            state: This rank's: entries of its own parameters, by their number among all.
            keep: Whether this rank wants the values.
            whole: Makes an entry whole, given its parameter's number, on the ranks of the stage that has it.
        """
        described = {
            index: {name: _described(value) for name, value in entries.items()}
            for index, entries in state["state"].items()
        }
        owners: dict[int, int] = {}
        shapes: dict[int, dict[str, Any]] = {}
        for position, heard in enumerate(self.exchange(described)):
            for index, entries in heard.items():
                if index not in owners:
                    owners[index], shapes[index] = position, entries
        wanted = (
            (owners[i], whole(i, state["state"][i][name]) if owners[i] == self.position else value.empty())
            for i in sorted(owners)
            for name, value in shapes[i].items()
            if isinstance(value, _Shape)
        )
        values = iter(self.gather(wanted, keep=keep))
        merged = {
            index: {n: next(values) if isinstance(v, _Shape) else v for n, v in shapes[index].items()}
            for index in sorted(owners)
        }
        return {**state, "state": merged}

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._pipeline.process_group is not None, "this rank is in it"
        return self._pipeline.process_group

    def _number(self, position: int) -> int:
        """The number of a rank in the process group, which orders its members by rank."""
        return sorted(self._pipeline.ranks).index(self._pipeline.ranks[position])

    def _empty(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)

    def _in_chunks(self, tensors: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
        """Neighbours with the same holder, as many as are sent at a time."""
        some: list[Tensor] = []
        size = 0
        holder = -1
        for owner, tensor in tensors:
            if some and (owner != holder or size >= _CHUNK_BYTES):
                yield holder, some
                some, size = [], 0
            holder = owner
            some.append(tensor)
            size += tensor.numel() * tensor.element_size()
        if some:
            yield holder, some


class _Shape:
    """What a tensor is like, without its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def empty(self) -> Tensor:
        return without_memory(torch.zeros((), dtype=self.dtype).expand(self.shape))


def _described(value: Any) -> Any:
    return _Shape(value) if isinstance(value, Tensor) else value
