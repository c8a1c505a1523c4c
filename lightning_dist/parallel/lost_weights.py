"""What is left of a sharded model whose fit has failed: parameters without values, and a clear word to who uses them.

Other ranks may be gone, so nothing can be gathered. A module that had shards refuses to be called and to give its
state, until its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from lightning_dist.errors import LostWeightsError


class LostWeights:
    """Hooks on one module. They go when a state that has all of what is lost is loaded.

    The one that sees to that stays, and does nothing any more: torch walks the hooks of its kind just then, and the
    module may have others.

    Args:
        module: Whose parameters are lost.
        sizes: Name -> size they had; they are empty now.
    """

    def __init__(self, module: nn.Module, sizes: Mapping[str, torch.Size]) -> None:
        self._sizes = dict(sizes)
        self._handles = [
            module.register_forward_pre_hook(self._refuse, prepend=True),
            module.register_state_dict_pre_hook(self._refuse),
        ]
        module.register_load_state_dict_pre_hook(self._restore)

    def _refuse(self, module: nn.Module, *_: Any) -> NoReturn:
        raise_lost(type(module).__name__)

    def _restore(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if not all(prefix + name in state_dict for name in self._sizes):
            return  # load_state_dict says what is missing
        for name, size in self._sizes.items():
            parameter = module._parameters[name]
            if parameter is not None and parameter.shape != size:  # tied: it may be there already
                parameter.data = parameter.data.new_empty(size)
        self._sizes = {}
        for handle in self._handles:
            handle.remove()


def has_lost_weights(module: nn.Module) -> bool:
    """Whether a part of it has."""
    hooks = (hook for inner in module.modules() for hook in inner._forward_pre_hooks.values())
    return any(isinstance(getattr(hook, "__self__", None), LostWeights) for hook in hooks)


def raise_lost(name: str) -> NoReturn:
    """Say what to do.

    Raises:
        LostWeightsError: Always.
    """
    raise LostWeightsError(
        f"the weights of this {name} were spread over ranks when a fit failed, so they are gone. Load the last "
        'checkpoint, by trainer.fit(model, ckpt_path="last") or model.load_state_dict(torch.load(path)["state_dict"]), '
        "or make the model anew"
    )
