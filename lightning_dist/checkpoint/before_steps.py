"""The moment before an optimizer's step changes anything.

Note [Where a step begins]
    Torch calls a step's pre-hooks before the step, so also before the step's closure, in which Lightning runs forward
    and backward. The moment meant here is after the closure: what it computes changes neither weights nor the
    optimizer's state. Optimizers that call theirs several times (LBFGS) change nothing before the first call has
    returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dist.errors import CombinationError


class BeforeSteps:
    """Does something at that moment.

    Args:
        action: What to do; often, so it is to be cheap where there is nothing to do.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """From now on, also before steps of these; any of them may be known already.

        Raises:
            CombinationError: One is no optimizer of torch's kind; Lightning takes whatever has the same methods.
        """
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise CombinationError(
                    f"{type(optimizer).__name__} is no torch.optim.Optimizer and does not say when it steps, which "
                    "checkpoint.snapshot=overlapped needs: write checkpoint.snapshot=at_once"
                )
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def release(self) -> None:
        """No more. Safe to call twice."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """See Note [Where a step begins]. ``args`` begins with the optimizer."""
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._acting_after(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._acting_after(kwargs["closure"])}
        self._action()
        return None

    def _acting_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            result = closure()
            self._action()
            return result

        return call
