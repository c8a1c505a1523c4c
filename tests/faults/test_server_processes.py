"""Server processes of rows by themselves: what they hold and step, killed and started again, and nothing left."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.gradsync.parameter_server.processes.handover import Handover
from lightning_dist.gradsync.parameter_server.processes.homes import Home
from lightning_dist.gradsync.parameter_server.processes.remote import Line, RemoteShard
from lightning_dist.gradsync.parameter_server.processes.task import Share, Task
from lightning_dist.gradsync.parameter_server.processes.watch import Death, Return, ServerProcess
from lightning_dist.gradsync.parameter_server.server import listening
from lightning_dist.gradsync.sparse.row_wise_adagrad import RowWiseAdagrad
from lightning_dist.gradsync.sparse.rows import Rows, Table, to_sparse

SECRET = b"s" * 32
TABLE = Table((12, 3), torch.float32)
DEADLINE_S = 60.0


class Served:
    """One table of one rank in a process, with a copy in another."""

    def __init__(self, stack: contextlib.ExitStack, *, copies: int) -> None:
        listeners = [listening("127.0.0.1") for _ in range(copies)]
        addresses = [("127.0.0.1", int(each.getsockname()[1])) for each in listeners]
        self.told: queue.Queue[Death | Return] = queue.Queue()
        self.processes = []
        for number, listener in enumerate(listeners):
            other = addresses[1 - number] if copies == 2 else None
            share = Share(0, (12,), listener.fileno(), other)
            task = Task((TABLE,), (share,), SECRET, DEADLINE_S)
            process = ServerProcess(Home("a", number), task, [listener], told=self.told.put)
            stack.callback(process.close)
            self.processes.append(process)
        self.lines = [self.line(address) for address in addresses]
        stack.callback(lambda: [line.close() for line in self.lines])
        torch.manual_seed(0)
        self.whole = torch.randn(12, 3)
        self.shard = RemoteShard(
            self.whole.clone(), table=TABLE, number=0, num_ranks=1, timeout_s=DEADLINE_S, alarm=lambda _: None
        )
        self.shard.open(self.lines)

    def line(self, address: tuple[str, int]) -> Line:
        return Line("a server", address, secret=SECRET, timeout_s=DEADLINE_S, alarm=lambda _: None)

    def rows(self, version: int) -> torch.Tensor:
        return self.shard.look_up(torch.arange(12), version)


@pytest.fixture
def served() -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        yield Served(stack, copies=2)


class Steps:
    """The same gradients for an optimizer of a whole table and for one whose table is in a process."""

    def __init__(self, kind: Any, options: dict[str, Any], served: Served) -> None:
        self.parameter, self.reference = nn.Parameter(torch.zeros(12, 3)), nn.Parameter(served.whole.clone())
        self.optimizer, self.expected = kind([self.parameter], **options), kind([self.reference], **options)
        self.served, self.version = served, 0
        self.handover = Handover({self.parameter: served.shard}, version=lambda: self.version)
        self.handover.attach(self.optimizer)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.version)
        rows = torch.randperm(12, generator=generator)[:4].sort().values
        values = torch.randn(4, 3, generator=generator)
        self.version += 1
        for parameter, optimizer in ((self.parameter, self.optimizer), (self.reference, self.expected)):
            parameter.grad = to_sparse(Rows(rows, values), TABLE)
            optimizer.param_groups[0]["lr"] = 0.1 / self.version  # a schedule's
            with torch.sparse.check_sparse_tensor_invariants(enable=False):  # said, so that torch does not warn of it
                optimizer.step()

    def check(self) -> None:
        assert torch.equal(self.served.rows(self.version), self.reference.detach())


KINDS: Sequence[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.SparseAdam, {"lr": 0.1, "betas": (0.8, 0.99)}),
    (RowWiseAdagrad, {"lr": 0.1}),
]


def test_steps_are_those_of_the_users_optimizer_also_after_either_process_is_killed(served: Served) -> None:
    """The optimizers take turns on the same rows."""
    for kind, options in KINDS:
        served.whole = served.rows(0) if kind is None else served.whole
        served.shard.write({"values": served.whole}, None)
        base = served.shard._told
        steps = Steps(kind, options, served)
        steps.version = base
        for _ in range(3):
            steps.step()
        steps.check()
        steps.handover.release()
        served.whole = steps.reference.detach().clone()
    steps = Steps(torch.optim.SparseAdam, {"lr": 0.1}, served)
    steps.version = served.shard._told
    for number in (0, 1):
        steps.step()
        pid = served.processes[number].pid
        os.kill(pid, signal.SIGKILL)
        steps.step()
        steps.check()
        assert served.told.get(timeout=DEADLINE_S) == Death(
            Home("a", number), "killed by SIGKILL", restarts=True, has_copy=True
        )
        assert isinstance(served.told.get(timeout=DEADLINE_S), Return)
        assert served.processes[number].pid != pid
    state = steps.optimizer.state_dict()
    expected = steps.expected.state_dict()
    for name, value in expected["state"][0].items():
        assert torch.equal(torch.as_tensor(state["state"][0][name]), torch.as_tensor(value)), name
    assert not steps.optimizer.state.get(steps.parameter), "nothing of it is here"
    steps.optimizer.load_state_dict(expected)
    steps.step()
    steps.check()
