"""The ways of synchronising gradients that are compared: this package's, Lightning's ddp, and torch's hooks on it.

Annotations are not put off here: DDP compares those of a hook with the classes themselves.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import HierDistStrategy

DDP = "Lightning ddp"
EXACT = "hierarchical"
TIMEOUT_S = 300.0
RANK = 4
PERIOD = 32
"""Inner steps of local SGD between two synchronisations."""

OURS: dict[str, dict[str, Any]] = {
    EXACT: {},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
    "onebit": {"codec": "onebit"},
    "topk": {"codec": "topk", "ratio": 0.01},
    "powersgd": {"algorithm": "powersgd", "powersgd": {"rank": RANK}},
    "local_sgd": {"algorithm": "local_sgd", "local_sgd": {"every": PERIOD}},
    "local_sgd int8": {"algorithm": "local_sgd", "codec": "int8", "local_sgd": {"every": PERIOD}},
}
"""Name -> what it says in ``sync``."""

PERIODIC = frozenset({"local_sgd", "local_sgd int8"})
"""Those that synchronise every :data:`PERIOD` steps only."""


def _bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's, under another name: DDP refuses the original without NCCL, by its name."""
    return bf16_compress_hook(state, bucket)


class HookedDDP(DDPStrategy):
    """Lightning's ddp with a communication hook, which it registers on CUDA only.

    Args:
        hook: torch's.
        make_state: Makes what the hook keeps.
        options: Of DDP.
    """

    def __init__(self, hook: Callable[..., Any], make_state: Callable[[], Any] = lambda: None, **options: Any) -> None:
        super().__init__(process_group_backend="gloo", **options)
        self._hook = hook
        self._make_state = make_state

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._make_state(), self._hook)


def _powersgd_state() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)  # 2 is the least it takes


THEIRS: dict[str, Callable[[], DDPStrategy]] = {
    DDP: lambda: DDPStrategy(process_group_backend="gloo"),
    "ddp, fp16_compress_hook": lambda: HookedDDP(fp16_compress_hook),
    "ddp, bf16_compress_hook": lambda: HookedDDP(_bf16),
    # In one bucket: it starts all-reduces from callbacks, which of several buckets come in any order, and Gloo aborts.
    "ddp, powerSGD_hook": lambda: HookedDDP(powerSGD_hook, _powersgd_state, bucket_cap_mb=1000),
}


def strategy_of(arm: str, *, parallel: str = "ddp", exact_steps: int = 0, **sync: Any) -> Any:
    """A new strategy.

    Args:
        arm: Of :data:`OURS` or :data:`THEIRS`.
        parallel: Mode of ours.
        exact_steps: So many steps are exact at the beginning of onebit.
        sync: More of ``sync``, for ours.
    """
    if arm in THEIRS:
        return THEIRS[arm]()
    warm_up = {"warmup_steps": exact_steps} if arm == "onebit" else {}
    return HierDistStrategy(parallel=parallel, sync={"timeout_s": TIMEOUT_S, **OURS[arm], **warm_up, **sync})
