"""What becomes of the gradients of sharded parameters: summed over ranks on lanes, while backward goes on.

Note [A backward]
    When a backward reaches the first group, gradients that are there already are set aside: FSDP2 would add to them at
    once what the lanes fill later. Each group hands over its gradients when they are complete; the groups' sums are
    started in one order, that of the modules backwards, which is the same on all ranks even where a rank does not use a
    module. What was set aside is added on the way, before the sum crosses to other replicas if it does. At the end of
    backward the groups that were not used hand over zeros, everything is waited for, and parameters that no rank used
    lose their gradient again.

    That end is the end of the graph task in which the loss itself gets its gradient, so that it comes before Lightning
    calls on_after_backward. A backward that the strategy did not start (``autograd.grad`` inside a step) sums nothing;
    see :mod:`~lightning_dist.parallel.inner_backward`.

    Three conditions make it right that FSDP2 goes on before a sum has arrived: the sum has the parameter's own type
    (FSDP2 would cast it at once), it is a mean (FSDP2 would scale it at once), and nothing is added to it. Where one
    does not hold, the sum is waited for where it is started.

Note [A schedule]
    A pipeline's schedule walks each module several times, in two parts perhaps, and knows itself when a group has its
    last gradient. Calls of modules then count for nothing; :meth:`GradientReduction.hand_over` hands groups over, still
    in one order, and :meth:`GradientReduction.finish_schedule` ends the batch. In between nothing waits for a lane: the
    ranks of a pipeline wait for each other's messages, and could close a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from lightning_dist.comm.collectives import RankGroup
from lightning_dist.errors import LateGradientError, UnusedParametersError
from lightning_dist.parallel.fsdp_groups import (
    GroupWatch,
    ShardedParam,
    end_backward,
    groups_of,
    has_gradient,
    name_of,
    names_of_groups,
    own_end_of_backward,
    params_of,
    some_of,
    trained,
    views_of,
)
from lightning_dist.parallel.inner_backward import InnerBackward
from lightning_dist.parallel.lane_sums import Arrived, LaneSums
from lightning_dist.parallel.lost_writes import LostWrites
from lightning_dist.parallel.replicated import ReplicatedGradients
from lightning_dist.parallel.row_gradients import RowGradients
from lightning_dist.parallel.used_shards import refuse_direct_gradients

Vote = Callable[[Sequence[bool]], list[bool]]
"""Every rank says yes or no to some questions; the answer to each is yes if any rank's is. Collective."""


class GradientReduction:
    """Sums gradients of parameter groups into shards; every rank makes it, and runs backward, alike.

    Args:
        root: FSDP2 was applied to it or to modules in it.
        sums: How groups' gradients become shards.
        replicated: Gradients of parameters that are whole on each rank.
        rows: Those of tables, which are sparse.
        vote: How ranks learn which parameters any of them used; ``None``: each must use all.
        waits_at_once: Whether each sum is waited for where it is started; see Note [A backward].
        max_pending: Sums under way before backward waits for the oldest: what bounds the memory they hold; ``None``:
            it never waits.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        sums: LaneSums,
        replicated: ReplicatedGradients,
        rows: RowGradients | None = None,
        vote: Vote | None,
        keeps_parameters: bool,
        waits_at_once: bool = False,
        max_pending: int | None = 4,
    ) -> None:
        self.synchronises = True  # whether backward sums at all
        self.crosses = True  # whether sums go on to other replicas
        self.ends_window = True  # whether the gradients are complete after the backward
        self.in_step = False  # whether a training step goes on
        self._root = root
        self._watches = [
            GroupWatch(
                group,
                keeps_parameters=keeps_parameters,
                in_step=lambda: self.in_step,
                on_backward=self._on_backward,
            )
            for group in groups_of(root)
        ]
        self._names = names_of_groups(root)
        self._inner = InnerBackward(root, keeps_parameters=keeps_parameters)
        self._sums = sums
        self._replicated = replicated
        self._rows = rows if rows is not None else RowGradients({}, None)
        self._vote = vote
        self._waits_at_once = waits_at_once
        self._max_pending = max_pending
        self._started: RemovableHandle | None = None  # by the strategy: how the loss tells that its backward begins
        self._running = False
        self._finished = False
        self.order: Sequence[int] = list(reversed(range(len(self._watches))))  # in which sums are started
        self._expected: list[int] = []
        self._launched = 0
        self._arrived: dict[int, tuple[torch.Tensor, torch.Tensor | None, bool]] = {}
        self._seen: set[int] = set()
        self._aside: dict[ShardedParam, torch.Tensor] = {}
        self._carried: set[ShardedParam] = set()  # of which gradients were there before
        own_end_of_backward(root)
        self._writes = LostWrites(root)
        self._refusals = refuse_direct_gradients(params_of(root))

    def arrive(self, index: int, output: torch.Tensor, gradients: torch.Tensor | None, mean: bool = True) -> None:
        """A group has its gradients.

        Args:
            index: Which group.
            output: To be filled with this rank's shard of their sum; filled already if ``gradients`` is ``None``.
            gradients: [group size x shard].
            mean: Whether the mean is wanted.
        """
        if index in self._seen:
            raise LateGradientError(
                f"{self._watches[index].group._module_fqn or 'the root'} was reached by one backward more often "
                "than it was called, which its gradients do not survive: write parallel=ddp"
            )
        self._arrived[index] = (output, gradients, mean)
        self._seen.add(index)
        if self._waits_at_once:
            self._launch(index)
            self._sums.wait(0)
            return
        while self._launched < len(self._expected) and self._expected[self._launched] in self._arrived:
            if self._max_pending is not None:
                self._sums.wait(self._max_pending - 1)
            self._launch(self._expected[self._launched])
            self._launched += 1

    def before_backward(self, loss: torch.Tensor) -> None:
        """The strategy starts a backward."""
        self._finished = False
        if loss.requires_grad:
            self._started = loss.register_hook(self._enter)

    def after_backward(self) -> None:
        """It is over; take part in the sums of one that came to none of this rank's groups."""
        if self._started is not None:
            self._started.remove()
            self._started = None
        if not self._finished:
            self._begin()
            self._finish()
        self._finished = False

    def hand_over(self, is_complete: Callable[[int], bool]) -> None:
        """Start the sums of groups that a schedule has completed; see Note [A schedule].

        Args:
            is_complete: Whether no more gradient comes to a group, by its number.
        """
        if self.synchronises and not self._waits_at_once:
            self._begin()
            self._force(is_complete)

    def finish_schedule(self) -> None:
        """A schedule is over: start the sums that are left, and wait for all of them."""
        self._begin()
        self._force(lambda index: True)
        self._finish()
        self._finished = False

    def _force(self, is_complete: Callable[[int], bool]) -> None:
        for index in self._expected if self.synchronises else self.order:
            if self.synchronises and index in self._seen:
                continue
            if not is_complete(index):
                return
            self._watches[index].force()

    def part(self, inside: RankGroup) -> None:
        """From now on replicas train apart: sums stay with the ranks that share the shards."""
        self._sums.part()
        self._replicated.part(inside)

    def forget(self) -> None:
        """No backward comes for the forwards there were."""
        for watch in self._watches:
            watch.reset()

    def release(self) -> None:
        """Leave FSDP2 as it was."""
        for handle in self._refusals:
            handle.remove()
        for watch in self._watches:
            watch.release()

    def _enter(self, gradient: torch.Tensor) -> None:
        """The loss has its gradient: this is the outermost graph task, whatever tasks run inside it."""
        Variable._execution_engine.queue_callback(self._finish)

    def _on_backward(self) -> bool:
        if self._started is None:
            self._inner.begin()
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        if self._running or not self.synchronises:
            return
        self._running = True
        self._launched = 0
        self._seen.clear()
        self._expected = [i for i in self.order if trained(self._watches[i].group)]
        for index in self._expected:
            for param in self._watches[index].group.fsdp_params:
                if param.sharded_param.grad is not None:
                    self._aside[param] = _local(param.sharded_param.grad)
                    param.sharded_param.grad = None
        self._carried = set(self._aside)

    def _launch(self, index: int) -> None:
        output, gradients, mean = self._arrived.pop(index)
        group = self._watches[index].group
        carried = [(view, self._aside.pop(p)) for p, view in views_of(group, output) if p in self._aside]
        self._sums.start(
            Arrived(group, index, self._names[index], output, gradients, mean, carried, crosses=self.crosses)
        )

    def _finish(self) -> None:
        try:
            self._begin()
            end_backward(self._root)
            if self.synchronises:
                self._complete()
                self._writes.check()
        finally:
            self._running = False
            self._finished = True
            self._arrived.clear()
            self._sums.forget()
            self._aside.clear()
            self.forget()

    def _complete(self) -> None:
        for index in self._expected:
            if index not in self._seen:
                self._watches[index].force()
        self._sums.wait(0)
        watches = [self._watches[index] for index in self._expected]
        params = [param for watch in watches for param in trained(watch.group)]
        used = [param in watch.used for watch in watches for param in trained(watch.group)]
        whole, rows = self._replicated.used(), self._rows.used()
        if self._vote is not None:
            answers = iter(self._vote([*used, *whole, *rows]))
            used, whole, rows = ([next(answers) for _ in asked] for asked in (used, whole, rows))
        if self.crosses:
            self._replicated.average(whole if self._vote is not None else [True] * len(whole))
        if self.ends_window:
            self._rows.average(rows if self._vote is not None else [True] * len(rows))
        for param, was_used in zip(params, used, strict=True):
            if not was_used and param not in self._carried:
                if param.sharded_param.grad is not None:
                    self._sums.give_back(param, _local(param.sharded_param.grad), crossed=self.crosses)
                param.sharded_param.grad = None
        if late := [name_of(param) for param in params if has_gradient(param)]:
            raise LateGradientError(
                f"gradients of {some_of(late)} arrived after those of their module were complete: it is used outside "
                "of its forward. Sharded modules do not take that: write parallel=ddp"
            )
        if self._vote is None:
            names = [*map(name_of, params), *self._replicated.names(), *self._rows.names()]
            self._refuse([name for name, was_used in zip(names, [*used, *whole, *rows], strict=True) if not was_used])

    def _refuse(self, names: Sequence[str]) -> None:
        if names:
            raise UnusedParametersError(
                f"some parameters took no part in producing the loss that training_step returned: {some_of(names)}. If "
                "that is intended, let them be found: parallel.find_unused_parameters=true, or "
                "HierDistStrategy(..., find_unused_parameters=True); or freeze them"
            )


def _local(gradient: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return local
