"""What the test process and a ready rank say to each other: plain values, pickled by us over a pipe of our own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.placement import Placement, Seat

MAIN_ALIAS = "__main_of_the_caller__"


@dataclass(frozen=True)
class RankContext:
    """What a function running on a rank knows about its place.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        host: Label of the host it sits on, as in the placement.
        local_rank: Index among the host's ranks.
        local_world_size: Number of ranks of the host.
        node_rank: Index of the host.
        placement: All hosts and their ranks.
        tmp_path: A folder that all ranks of this call share; removed after it.
        deadline_s: Time the whole call has, in seconds.
    """

    rank: int
    world_size: int
    host: str
    local_rank: int
    local_world_size: int
    node_rank: int
    placement: Placement
    tmp_path: Path
    deadline_s: float

    def barrier(self) -> None:
        """Wait for all ranks of the default group."""
        import torch.distributed as dist

        dist.barrier()


@dataclass(frozen=True)
class FunctionReference:
    """A top-level function by name, so that a rank imports it itself."""

    module: str
    name: str
    path: str | None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionReference:
        """Refer to a function.

        Raises:
            ValueError: It is not at the top level of a module.
        """
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        if not module or not name or "<" in name:
            raise ValueError(f"ranks run functions at the top level of a module, got {function!r}; move it there")
        if module != "__main__":
            return cls(module, name, None)
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        if spec is not None and spec.name:
            return cls(spec.name, name, None)
        return cls(MAIN_ALIAS, name, str(Path(str(main.__file__)).resolve()))

    def resolve(self) -> Callable[..., Any]:
        """Import the function."""
        found: Any = sys.modules.get(self.module) if self.path is not None else importlib.import_module(self.module)
        if found is None:
            spec = importlib.util.spec_from_file_location(self.module, str(self.path))
            assert spec is not None
            assert spec.loader is not None
            found = sys.modules[self.module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """One call on one rank.

    Attributes:
        function: What to call, as ``function(context, *args, **kwargs)``.
        arguments: Pickled ``(args, kwargs)``; unpickled where a failure can be reported.
        seat: Where the rank sits.
        placement: All hosts and their ranks.
        environment: Variables set during the call.
        tmp_path: Folder shared by the ranks.
        deadline_s: Time the call has, in seconds.
        group_timeout_s: Deadline of the default group's collectives, in seconds; ``None`` makes no default group.
        seed: Seeds torch, numpy and random, the same on all ranks.
    """

    function: FunctionReference
    arguments: bytes
    seat: Seat
    placement: Placement
    environment: dict[str, str]
    tmp_path: Path
    deadline_s: float
    group_timeout_s: float | None
    seed: int


@dataclass(frozen=True)
class Outcome:
    """A rank's answer: a pickled value, or what was raised."""

    value: bytes | None = None
    summary: str = ""
    traceback: str = ""
    exception: bytes | None = None


@dataclass(frozen=True)
class CleanUp:
    """To a rank, once all ranks have answered: leave the groups, and say what you would leave behind."""


@dataclass(frozen=True)
class Cleaned:
    """A rank has left its groups; what it would leave behind (threads, children, descriptors) is listed."""

    leaks: list[str] = field(default_factory=list)
