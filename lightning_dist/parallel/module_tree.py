"""A model as a tree of modules: paths, parameters and their users, and what others have put around a module."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

COMPILED = "_orig_mod"  # the name under which torch.compile's wrapper holds the module


class ModuleTree:
    """A model's modules and parameters, each with all paths that lead to it, in the order of definition."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths: dict[nn.Module, list[str]] = {}
        self.users: dict[nn.Parameter, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.paths.setdefault(module, []).append(path)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.users.setdefault(parameter, []).append(join(path, name))
        self.numel = sum(parameter.numel() for parameter in self.users)

    def shared(self, module: nn.Module) -> tuple[str, str] | None:
        """Paths of a parameter of the module, in and outside of it; None if it shares none."""
        within = tuple(f"{path}." for path in self.paths[module])
        for parameter in module.parameters():
            users = self.users[parameter]
            outside = [user for user in users if not user.startswith(within)]
            if outside:
                return next(user for user in users if user.startswith(within)), outside[0]
        return None


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class as written: without what torch.compile wraps around it and what fully_shard puts in front."""
    cls = type(uncompiled(module))
    return cls.__bases__[1] if FSDPModule in cls.__bases__ else cls


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, or the module itself."""
    while (inner := module._modules.get(COMPILED)) is not None:
        module = inner
    return module


def has_parts(module: nn.Module) -> bool:
    """Whether it is made of other modules, other than what torch.compile wraps."""
    return any(child is not None for child in uncompiled(module)._modules.values())


def has_forward(module: nn.Module) -> bool:
    """Whether it can be called; a ModuleList or ModuleDict cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def numel_of(module: nn.Module) -> int:
    """Elements of its parameters, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def join(path: str, name: str) -> str:
    """The path of a child; the model's own path is empty."""
    return f"{path}.{name}" if path else name
