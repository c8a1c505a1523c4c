"""A running Hydra job, handed to other processes exactly as it is.

Ranks that are started by running the command again would compose the config again: ``${now:}`` would be a later
moment, ``-m`` would walk the whole sweep, quotes would be lost. Instead the job's composed config is written to a
file without a name, and the child runs ``script --experimental-rerun /dev/fd/N``: Hydra then composes nothing and calls
the task function with it.

Note [values that are fixed]
    An interpolation among config values stays one, so that a task which edits its config sees the same effects on every
    rank. What would come out differently in another process is replaced by its value: Hydra's own resolvers
    (``${now:}``, ``${hydra:}``), and any resolver called without reference to other values, such as ``${oc.env:HOME}``.
    Resolvers with a cache (``${now:}`` has one) are asked through the task's own config where that is known, that is,
    under :func:`lightning_dist.launch.job`.

Only imported once an application has imported Hydra.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import Container, DictConfig, ListConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from lightning_dist.errors import LaunchError

_RESOLVER_CALL = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
_NODE_REFERENCE = re.compile(r"\$\{[^:{}]*\}")
_HYDRA_RESOLVERS = {"now", "hydra", "python_version"}


@dataclass(frozen=True)
class HydraJob:
    """One job: its whole config with the ``hydra`` node, and where it runs.

    Attributes:
        config: The composed config; values that differ between processes are fixed.
        cwd: Working directory in which a process of the job starts.
        original_cwd: Working directory of the command that started Hydra.
    """

    config: DictConfig
    cwd: str
    original_cwd: str

    def pickled(self, *, rank: int) -> bytes:
        """The config for a rank, as Hydra's rerun option reads it.

        The log file of the job's logging gets the rank in its name, so that ranks do not write into one file.

        Raises:
            LaunchError: The config holds an object that cannot be pickled.
        """
        config = copy.deepcopy(self.config)
        _log_by_rank(config, rank)
        try:
            return pickle.dumps(config)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise LaunchError(
                f"the Hydra config cannot be handed to the other ranks ({error}); keep plain values in the config and "
                "make objects from them in the task"
            ) from error

    def command(self, path: str) -> list[str]:
        """The command, after the interpreter's own options, that runs this job with the pickled config at ``path``."""
        import __main__  # which module is __main__ is known only when it runs

        spec = __main__.__spec__
        script = [os.path.join(self.original_cwd, sys.argv[0])] if spec is None else ["-m", spec.name]
        return [*script, "--experimental-rerun", path]


def running_job_key() -> object | None:
    """Something that is the same object during a job and another one in the next; ``None`` outside of jobs."""
    return HydraConfig.instance().cfg


def current_job(task_config: DictConfig | None = None) -> HydraJob | None:
    """The running job, or ``None``.

    Args:
        task_config: The config handed to the task function, before the task edits it.
    """
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    root = OmegaConf.create({"hydra": hydra})
    whole = hydra._get_parent()  # type: ignore[attr-defined]  # set by HydraConfig: the config of the job
    root = whole if isinstance(whole, DictConfig) else root
    config = copy.deepcopy(root)
    for path in list(_paths(config, ())):
        source = task_config if task_config is not None and path[0] != "hydra" else root
        _fix(config, source, path)
    original_cwd = str(hydra.runtime.cwd)
    cwd = str(hydra.runtime.output_dir) if hydra.job.chdir else original_cwd
    return HydraJob(config, cwd, original_cwd)


def _paths(node: Container, prefix: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Where in the config interpolations are."""
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    keys = range(len(node)) if isinstance(node, ListConfig) else node.keys() if isinstance(node, DictConfig) else ()
    for key in keys:
        child = node._get_node(key)
        if isinstance(child, list) or child is None:
            continue
        if child._is_interpolation():
            yield (*prefix, key)
        elif isinstance(child, Container):
            yield from _paths(child, (*prefix, key))


def _fix(config: DictConfig, source: DictConfig, path: tuple[Any, ...]) -> None:
    """Replace an interpolation by its value in ``source`` if other processes would get another one."""
    holder: Any = config
    try:
        for key in path[:-1]:
            holder, source = holder[key], source[key]
        raw = str(holder._get_node(path[-1])._value())
        calls = set(_RESOLVER_CALL.findall(raw))
        if not calls or not (calls & _HYDRA_RESOLVERS or not _NODE_REFERENCE.search(raw)):
            return
        value = source[path[-1]]
        if isinstance(value, str) and "${" in value:
            return  # an escaped interpolation; as a plain value it would be taken for a real one
        with flag_override(holder, ["readonly", "struct"], [False, False]):
            holder[path[-1]] = value
    except (OmegaConfBaseException, KeyError):
        return  # fails on access here, and does so in the other process too


def _log_by_rank(config: DictConfig, rank: int) -> None:
    handlers = OmegaConf.select(config, "hydra.job_logging.handlers")
    if not isinstance(handlers, DictConfig):
        return
    for name in handlers:
        handler = handlers[name]
        filename = handler.get("filename") if isinstance(handler, DictConfig) else None
        if filename:
            stem, extension = os.path.splitext(str(filename))
            with flag_override(handler, ["readonly", "struct"], [False, False]):
                handler["filename"] = f"{stem}.rank{rank}{extension}"
