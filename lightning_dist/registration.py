"""The names under which a Trainer finds the strategy; they mirror those of Lightning's ``ddp``."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lightning_dist.config import PARALLEL_MODES
from lightning_dist.errors import ConfigError
from lightning_dist.strategy import HierDistStrategy

START_METHOD_OF_NAME: Mapping[str, str] = {
    "hierdist": "popen",
    "hierdist_spawn": "spawn",
    "hierdist_fork": "fork",
    "hierdist_notebook": "fork",
}

_PARALLEL_OF_SUFFIX: Mapping[str, dict[str, str]] = {
    "": {},
    **{f"_{mode}": {"parallel": mode} for mode in PARALLEL_MODES if mode != "ddp"},
}


def register_strategies(registry: Any) -> None:
    """Register every name; safe to call twice.

    Args:
        registry: That of ``lightning.pytorch``.
    """
    for name, arguments in _variants().items():
        registry.register(
            name,
            HierDistStrategy,
            description=f"HierDistStrategy({', '.join(f'{key}={value!r}' for key, value in arguments.items())})",
            override=True,
            **arguments,
        )


def refuse_in_other_package(modules: Mapping[str, ModuleType]) -> None:
    """Let a ``pytorch_lightning.Trainer`` that is given one of the names say which package to use.

    It has a registry of its own, which is left alone unless that package was imported before this one: importing it
    here would cost every user seconds.

    Args:
        modules: ``sys.modules``.
    """
    strategies = modules.get("pytorch_lightning.strategies")
    registry = getattr(strategies, "StrategyRegistry", None)  # absent while the package is being imported
    if registry is not None:
        for name in _variants():
            registry.register(name, _refuse, description="for lightning.pytorch only", override=True)


def _variants() -> dict[str, dict[str, Any]]:
    """``hierdist``, ``hierdist_spawn``, ``hierdist_zero2``, ``hierdist_zero2_find_unused_parameters_true``, ..."""
    return {
        f"{name.replace('hierdist', f'hierdist{mode_suffix}')}{suffix}": {
            "start_method": start_method,
            **parallel,
            **arguments,
        }
        for mode_suffix, parallel in _PARALLEL_OF_SUFFIX.items()
        for name, start_method in START_METHOD_OF_NAME.items()
        for suffix, arguments in (
            ("", {}),
            ("_find_unused_parameters_true", {"find_unused_parameters": True}),
            ("_find_unused_parameters_false", {"find_unused_parameters": False}),
        )
    }


def _refuse(**_: Any) -> None:
    raise ConfigError(
        "lightning_dist's strategies are for lightning.pytorch.Trainer; pytorch_lightning is another package with "
        "classes of its own. Write 'import lightning.pytorch as pl', not 'import pytorch_lightning as pl', everywhere."
    )
