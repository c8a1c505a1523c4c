"""How it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.errors import CombinationError
from lightning_dist.run_config.checks import check_choice, check_number

OPTIMIZER_KINDS = ("adamw", "sgd")
SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW.

    Attributes:
        kind: ``adamw``.
        lr: Peak learning rate.
        weight_decay: Decay of matrices; biases, norms and embeddings have none.
        beta1: Decay of the mean of gradients, 0 up to but not including 1.
        beta2: Decay of the mean of squared gradients, 0 up to but not including 1.
        eps: Added to the denominator.
        schedule: After the warm-up: ``cosine`` (down to ``min_lr_ratio`` at ``trainer.max_steps``) or ``constant``.
        warmup_steps: Optimizer steps over which the rate rises linearly from 0; 0 means none.
        min_lr_ratio: Last rate of the cosine over the peak (0 to 1).
    """

    kind: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    schedule: str = "cosine"
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_choice("optimizer.kind", self.kind, ("adamw",))
        check_number("optimizer.beta1", self.beta1, low=0, below=1)
        check_number("optimizer.beta2", self.beta2, low=0, below=1)
        check_number("optimizer.eps", self.eps, low=0)
        _check_rates(self)


@dataclass(frozen=True)
class SGDConfig:
    """Stochastic gradient descent.

    Attributes:
        kind: ``sgd``.
        lr: Peak learning rate.
        weight_decay: Decay of all parameters.
        momentum: Part of the last step that is kept, 0 up to but not including 1.
        nesterov: Nesterov's momentum; needs ``momentum`` above 0.
        schedule: After the warm-up: ``cosine`` (down to ``min_lr_ratio`` at ``trainer.max_steps``) or ``constant``.
        warmup_steps: Optimizer steps over which the rate rises linearly from 0; 0 means none.
        min_lr_ratio: Last rate of the cosine over the peak (0 to 1).
    """

    kind: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    schedule: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_choice("optimizer.kind", self.kind, ("sgd",))
        check_number("optimizer.momentum", self.momentum, low=0, below=1)
        if self.nesterov and not self.momentum:
            raise CombinationError("optimizer.nesterov=true needs optimizer.momentum above 0, e.g. 0.9")
        _check_rates(self)


def _check_rates(optimizer: AdamWConfig | SGDConfig) -> None:
    check_choice("optimizer.schedule", optimizer.schedule, SCHEDULES)
    check_number("optimizer.lr", optimizer.lr, low=0)
    check_number("optimizer.weight_decay", optimizer.weight_decay, low=0)
    check_number("optimizer.warmup_steps", optimizer.warmup_steps, low=0, whole=True)
    check_number("optimizer.min_lr_ratio", optimizer.min_lr_ratio, low=0, high=1)
