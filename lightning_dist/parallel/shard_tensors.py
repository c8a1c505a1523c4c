"""The whole tensors of a model that FSDP2 has sharded, after its layers were split or not."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.errors import CombinationError
from lightning_dist.parallel.boxes import Box, Spread, rows_of, whole_box
from lightning_dist.parallel.fsdp_groups import ShardedParam, name_of, params_of
from lightning_dist.parallel.full_tensors import FullTensors, without_memory
from lightning_dist.parallel.tensor.model import SplitParameter, TensorParallel


class ShardTensors(FullTensors):
    """Gathers rows over the ranks that share the shards, then, of a split layer, parts over those that share the layer.

    Args:
        root: The sharded module.
        scatter: Gathers over the ranks that share the shards.
        split: What was split before; ``None`` if nothing was.
        axes: Of the layout, over which shards are spread.
    """

    def __init__(
        self,
        root: nn.Module,
        scatter: HierarchicalScatter,
        split: TensorParallel | None = None,
        *,
        axes: frozenset[str],
    ) -> None:
        self._root = root
        self._scatter = scatter
        self._split = split
        self._axes = axes
        self._known: dict[int, tuple[nn.Parameter, ShardedParam]] = {}

    def shape_of(self, parameter: nn.Parameter) -> torch.Size | None:
        """See :class:`FullTensors`; a gathered copy that a module shows instead of its shard is spread if split."""
        param = self._param_of(parameter)
        return None if param is None else param._sharding_spec.shape

    def spread_of(self, parameter: nn.Parameter) -> Spread:
        """See :class:`FullTensors`."""
        param = self._param_of(parameter)
        assert param is not None, "asked for spread parameters only"
        entry = self._entry_of(param)
        if entry is not None and self._split is not None:
            spread = self._split.spread_of(entry)
        else:
            spread = Spread(tuple(param._orig_size), (whole_box(param._orig_size),), frozenset())
        if parameter is not param.sharded_param:
            return spread
        rows = param.padded_sharded_param_size[0]
        boxes = rows_of(spread.boxes, self._scatter.index * rows, (self._scatter.index + 1) * rows)
        return Spread(spread.shape, boxes, spread.axes | self._axes)

    def spread_of_entry(self, parameter: nn.Parameter, value: DTensor) -> Spread:
        """One that is not of the parameter's shape (a value a row, a value a column) is spread as torch likes.

        Raises:
            CombinationError: It belongs to a split layer.
        """
        param = self._param_of(parameter)
        assert param is not None, "asked for spread parameters only"
        spec, shape = param._sharding_spec, value.shape
        if shape == spec.shape and value.placements == spec.placements:
            return self.spread_of(parameter)
        if self._entry_of(param) is not None:
            raise CombinationError(
                f"an optimizer keeps a tensor of shape {tuple(shape)} for {name_of(param)}, which is of shape "
                f"{tuple(spec.shape)}, and whose layer is split and sharded: write parallel.tensor.size=1, or an "
                "optimizer whose state has the parameters' shapes"
            )
        if not isinstance(value.placements[0], Shard):
            return Spread(tuple(shape), (whole_box(shape),), frozenset())
        sizes, offsets = compute_local_shape_and_global_offset(shape, value.device_mesh, value.placements)
        box = Box(tuple(offsets), tuple(sizes), (0,) * len(sizes))
        return Spread(tuple(shape), (box,) if box.numel else (), self._axes)

    def whole(self, parameter: nn.Parameter, value: DTensor, *, keep: bool = True) -> torch.Tensor:
        """See :class:`FullTensors`."""
        param = self._param_of(parameter)
        assert param is not None, "asked for spread parameters only"
        local = value._local_tensor
        gathered = self.gather(param, local) if parameter is param.sharded_param else local.detach()
        entry = self._entry_of(param)
        if entry is not None and self._split is not None:
            gathered = self._split.whole(entry, gathered)
        return gathered if keep else without_memory(gathered)

    def cut(self, parameter: nn.Parameter, whole: torch.Tensor) -> DTensor:
        """See :class:`FullTensors`."""
        param = self._param_of(parameter)
        assert param is not None, "asked for spread parameters only"
        entry = self._entry_of(param)
        if entry is not None and self._split is not None:
            whole = self._split.part(entry, whole)
        if parameter is not param.sharded_param:
            return self.placed(parameter, whole)
        rows = param.padded_sharded_param_size[0]
        low = min(self._scatter.index * rows, whole.shape[0])
        return self.placed(parameter, whole[low : low + rows])

    def placed(self, parameter: nn.Parameter, part: torch.Tensor) -> DTensor:
        """See :class:`FullTensors`."""
        param = self._param_of(parameter)
        assert param is not None, "asked for spread parameters only"
        part = part.to(param.sharded_param.device).contiguous()
        if parameter is param.sharded_param:
            return param.to_sharded_dtensor(part.view(param.sharded_size))
        entry = self._entry_of(param)
        assert self._split is not None, "what is shown gathered and is spread is split"
        assert entry is not None
        return self._split.placed(entry, part)

    def whole_entry(self, parameter: nn.Parameter, value: DTensor, *, keep: bool) -> torch.Tensor:
        """One that is not of the parameter's shape (a value a row, a value a column) is spread as torch likes."""
        param = self._param_of(parameter)
        assert param is not None, "asked for spread parameters only"
        spec = param._sharding_spec
        if value.shape == spec.shape and value.placements == spec.placements:
            return self.whole(parameter, value, keep=keep)
        gathered = value.full_tensor()
        return gathered if keep else without_memory(gathered)

    def cut_entry(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """Of one that is not of the parameter's shape: its rows if it has as many, else all of it."""
        param = self._param_of(parameter)
        assert param is not None, "asked for spread parameters only"
        if value.shape == param._sharding_spec.shape:
            return self.cut(parameter, value)
        if value.dim() == 0 or self._entry_of(param) is not None:  # 0-dim: a count of steps
            return value
        mesh, value = param._sharding_spec.mesh, value.to(param.sharded_param.device)
        if value.shape[0] != param._orig_size[0]:
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        rows = param.padded_sharded_param_size[0]
        shard = value[self._scatter.index * rows :][:rows].contiguous()
        return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())

    def gather(self, param: ShardedParam, shard: torch.Tensor) -> torch.Tensor:
        """All rows of a tensor that is sharded as ``param`` is, of a split layer those of this rank's part; collective.

        Args:
            param: The parameter, of any shape but 0-dim.
            shard: This rank's rows of it, or of a tensor of its shape.
        """
        padded = shard.new_zeros(param.padded_sharded_param_size)
        padded[: shard.shape[0]].copy_(shard.detach())
        whole = padded.new_empty((len(self._scatter.members) * padded.shape[0], *padded.shape[1:]))
        self._scatter.all_gather(whole.view(-1), padded.view(-1), name=name_of(param)).wait()
        return whole[: param._orig_size[0]]

    def unsharded(self, param: ShardedParam) -> torch.Tensor:
        """A parameter as it was before FSDP2, split if it was; collective."""
        gathered = self.gather(param, param._sharded_local_tensor)
        entry = self._entry_of(param)
        return gathered if entry is None or self._split is None else self._split.placed(entry, gathered)

    def _entry_of(self, param: ShardedParam) -> SplitParameter | None:
        if self._split is None:
            return None
        info = param._module_info
        return self._split.entry_at(info.module, info.param_name)

    def _param_of(self, parameter: nn.Parameter) -> ShardedParam | None:
        """What FSDP2 knows of a parameter; ``None`` if it is whole."""
        found = self._known.get(id(parameter))
        if found is None or found[0] is not parameter:
            self._known = {}
            for param in params_of(self._root):
                shown = [param.sharded_param, *([param._unsharded_param] if param.is_dtensor else [])]
                self._known.update({id(each): (each, param) for each in shown})
            found = self._known.get(id(parameter))
        return None if found is None else found[1]
