"""A backward that the strategy did not start: gradients with respect to inputs, taken inside a step.

``torch.autograd.grad(outputs, inputs)`` walks modules that are sharded, so their parameters are gathered for it, but it
leaves no gradients in them and nothing is to be summed. With ``create_graph`` the outer backward will walk what the
inner one did, reading parameters in between, and gradients come in no known order: the modules then stay gathered, and
hand over their gradients, at the end of the outer one (see ``GroupWatch.hold``).

What does leave gradients, ``loss.backward()`` where ``self.manual_backward(loss)`` is meant, is refused: they would
stay this rank's own.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Variable

from lightning_dist.errors import UnsummedGradientError
from lightning_dist.parallel.fsdp_groups import ShardedParam, end_inner_backward, name_of, params_of, some_of


class InnerBackward:
    """From the first module such a backward comes to, to the end of its graph task.

    Args:
        root: FSDP2 was applied to it or to modules in it.
        keeps_parameters: Whether parameters stay gathered between a forward and its backward.
    """

    def __init__(self, root: nn.Module, *, keeps_parameters: bool) -> None:
        self._root = root
        self._keeps_parameters = keeps_parameters
        self._task: int | None = None
        self._before: dict[ShardedParam, object] = {}

    def begin(self) -> None:
        """It comes to a module."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        self._before = {param: _gradient_of(param) for param in params_of(self._root)}
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._task = None
        end_inner_backward(self._root, reshard=not self._keeps_parameters)
        before, self._before = self._before, {}
        changed = [name_of(param) for param, gradient in before.items() if _gradient_of(param) != gradient]
        if changed:
            raise UnsummedGradientError(
                f"a backward that the strategy did not start left gradients in {some_of(changed)}, which no other rank "
                "knows of: return the loss from training_step, or, with self.automatic_optimization = False, write "
                "self.manual_backward(loss) in place of loss.backward(). For gradients with respect to inputs write "
                "torch.autograd.grad(outputs, inputs)"
            )


def _gradient_of(param: ShardedParam) -> object:
    """Which gradient it has, and how often it was written."""
    gradient = param._unsharded_param.grad
    return None if gradient is None else (id(gradient), gradient._version)
