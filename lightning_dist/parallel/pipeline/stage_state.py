"""``state_dict`` and ``load_state_dict`` of a model that is cut into stages: whole, under the uncut model's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_dist.parallel.full_tensors import FullTensors
from lightning_dist.parallel.pipeline.absent import AbsentTensors
from lightning_dist.parallel.pipeline.cut import Cut
from lightning_dist.parallel.pipeline.parts import part_of
from lightning_dist.parallel.pipeline.whole import StageGather
from lightning_dist.parallel.state_hooks import StateHooks


class StageStateHooks(StateHooks):
    """Fills in what other stages hold, and leaves out what they load.

    Args:
        root: The module that is cut.
        cut: Who holds what.
        absent: What this rank does not hold.
        gather: Brings tensors from their holders.
        full: Makes whole what the ranks of a stage have parts of; ``None`` where layers are not split.
    """

    def __init__(
        self, root: nn.Module, cut: Cut, absent: AbsentTensors, gather: StageGather, full: FullTensors | None
    ) -> None:
        super().__init__(root)
        self._cut = cut
        self._absent = absent
        self._gather = gather
        self._full = full
        self._dropped: set[str] = set()
        self._loaded: list[RemovableHandle] = [
            module.register_load_state_dict_post_hook(self._forgive) for module in root.modules()
        ]

    def complete(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """See :class:`~lightning_dist.parallel.state_hooks.StateHooks`."""
        names: dict[Tensor, list[str]] = {}
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            if isinstance(state_dict.get(prefix + name), Tensor):
                names.setdefault(tensor, []).append(prefix + name)
        held = ((self._cut.owner(tensor), self._whole(tensor, state_dict[users[0]])) for tensor, users in names.items())
        for values, (tensor, users) in zip(self._gather.gather(held, keep=self.keep), names.items(), strict=True):
            whole = values if self.on_cpu or not self.keep else values.to(tensor.device)
            state_dict.update(dict.fromkeys(users, whole))

    def cut(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """See :class:`~lightning_dist.parallel.state_hooks.StateHooks`."""
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            value = state_dict.get(prefix + name)
            if not isinstance(value, Tensor) or value.shape != tensor.shape:
                continue  # load_state_dict says so
            if tensor in self._absent:
                del state_dict[prefix + name]
                self._dropped.add(prefix + name)
            elif self._full is not None and isinstance(tensor, DTensor) and not isinstance(value, DTensor):
                state_dict[prefix + name] = self._full.cut(_parameter(tensor), value)

    def release(self) -> None:
        """Take the hooks away."""
        super().release()
        for handle in self._loaded:
            handle.remove()

    def _whole(self, tensor: Tensor, value: Tensor) -> Tensor:
        """On the ranks of the stage that owns it, the whole of it; collective there."""
        if self._full is None or self._cut.owner(tensor) != self._gather.position or not isinstance(value, DTensor):
            return value
        return self._full.whole(_parameter(tensor), value)

    def _forgive(self, module: nn.Module, incompatible: Any) -> None:
        """What was left out is not missing."""
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in self._dropped]


def fill_in(cut: Cut, absent: AbsentTensors, gather: StageGather) -> None:
    """Make the model whole on every rank of the pipeline; collective."""
    absent.restore()
    with torch.no_grad():
        gather.fill([(cut.owner(tensor), part_of(tensor).detach()) for tensor in cut.tensors])


def _parameter(tensor: Tensor) -> nn.Parameter:
    assert isinstance(tensor, nn.Parameter), "buffers are not split"
    return tensor
