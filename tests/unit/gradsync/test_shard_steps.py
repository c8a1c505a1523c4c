"""Shards that step themselves: versions, who waits for whom, what a checkpoint sees; and what has changed since."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.errors import CollectiveTimeoutError, CombinationError, PeerLostError
from lightning_dist.gradsync.parameter_server.history import History
from lightning_dist.gradsync.parameter_server.outbox import Outbox
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.parameter_server.stepping import (
    RowOptimizer,
    group_of,
    made_of,
    options_of,
    refuse_wide_steps,
    twin_of,
)
from lightning_dist.gradsync.sparse.rows import Rows

ROWS, RANKS = 8, 2
ALL = torch.arange(ROWS)


def rows(*numbers: int, value: float = 1.0) -> Rows:
    return Rows(torch.tensor(numbers, dtype=torch.int64), torch.full((len(numbers), 1), value))


def shard_of(
    staleness: int | None, *, timeout_s: float = 10.0, alarm: Callable[[float], str | None] | None = None
) -> Shard:
    """Its steps add the mean, times what the options say."""
    values = torch.zeros(ROWS, 1)

    def step(mean: Rows, options: Mapping[str, Any]) -> None:
        values[mean.indices] += mean.values * options["lr"]

    return Shard(
        values, num_ranks=RANKS, timeout_s=timeout_s, alarm=alarm or (lambda _: None), staleness=staleness, step=step
    )


def push(shard: Shard, rank: int, step: int, *numbers: int, lr: float = 1.0) -> None:
    shard.push(rank, step, rows(*numbers, value=2.0), {"lr": lr})


def test_whoever_pushes_last_makes_the_step_with_the_lowest_ranks_options() -> None:
    shard = shard_of(1)
    push(shard, 1, 0, 3, lr=100.0)
    push(shard, 1, 1, 4, lr=100.0)
    assert not shard.values.any()
    push(shard, 0, 0, 3, 5, lr=2.0)
    assert shard.values[:, 0].tolist() == [0, 0, 0, 4, 0, 2, 0, 0]
    assert torch.equal(shard.look_up(ALL, 1), shard.values)


@pytest.mark.parametrize("staleness", [1, 3])
def test_each_version_is_told_until_nobody_can_ask_for_it(staleness: int) -> None:
    shard, versions = shard_of(staleness), [torch.zeros(ROWS, 1)]
    drawn = random.Random(0)
    for step in range(10):
        for rank in range(RANKS):
            push(shard, rank, step, *sorted(drawn.sample(range(ROWS), 3)))
        versions.append(shard.values.clone())
        for version in range(max(0, step + 1 - staleness), step + 2):
            some = torch.tensor(sorted(drawn.sample(range(ROWS), 5)))
            assert torch.equal(shard.look_up(some, version), versions[version][some])


def test_who_is_too_far_ahead_waits() -> None:
    shard = shard_of(1)
    push(shard, 0, 0, 0)
    push(shard, 0, 1, 0)
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(push, shard, 0, 2, 0)
        assert not wait([third], timeout=0.2).done
        push(shard, 1, 0, 0)
        third.result(timeout=10)


def test_a_wait_for_room_ends_at_the_deadline_and_at_an_alarm() -> None:
    slow = shard_of(0, timeout_s=0.1)
    push(slow, 0, 0, 0)
    with pytest.raises(CollectiveTimeoutError, match="for the end of step 1"):
        push(slow, 0, 1, 0)
    lost = shard_of(0, alarm=lambda _: "rank 1 (host b) has ended")
    push(lost, 0, 0, 0)
    with pytest.raises(PeerLostError, match=r"rank 1 \(host b\) has ended"):
        push(lost, 0, 1, 0)


@pytest.mark.parametrize(("rank", "step"), [(2, 0), (-1, 0), (0, 0)], ids=["no rank", "below", "twice"])
def test_a_push_that_cannot_be_is_refused(rank: int, step: int) -> None:
    shard = shard_of(2)
    push(shard, 0, 0, 0)
    with pytest.raises(ValueError, match="is not expected"):
        push(shard, rank, step, 0)


def test_without_order_each_push_is_a_step() -> None:
    shard = shard_of(None)
    push(shard, 1, 0, 3)
    push(shard, 1, 1, 3)
    assert shard.look_up(torch.tensor([3]), None).tolist() == [[2.0]], "half of each, as in a mean"


def test_a_checkpoint_has_the_steps_before_it_and_holds_those_after() -> None:
    shard = shard_of(None)
    push(shard, 0, 0, 0)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(shard.wait_for, 1)
        assert not wait([waiting], timeout=0.2).done
        push(shard, 1, 0, 1)
        waiting.result(timeout=10)
        later = pool.submit(push, shard, 1, 1, 1)
        assert not wait([later], timeout=0.2).done
        assert shard.values[:2, 0].tolist() == [1, 1]
        shard.go_on()
        later.result(timeout=10)
    assert shard.values[:2, 0].tolist() == [1, 2]


def test_an_optimizer_that_fails_ends_the_shard_and_all_learn_why() -> None:
    shard = Shard(torch.zeros(ROWS, 1), num_ranks=1, timeout_s=10, alarm=lambda _: None, staleness=1, step=broken)
    for ask in (lambda: push(shard, 0, 0, 0), lambda: shard.look_up(ALL, 1)):
        with pytest.raises(PeerLostError, match="its optimizer failed: ArithmeticError: no such luck"):
            ask()


def broken(mean: Rows, options: Mapping[str, Any]) -> None:
    raise ArithmeticError("no such luck")


def test_changes_between_versions() -> None:
    history = History(3)
    for version, changed in enumerate([[0, 1], [1, 2], [], [5]], start=1):
        history.note(version, torch.tensor(changed, dtype=torch.int64))
    assert history.changed(ALL, 1, 2).nonzero()[:, 0].tolist() == [1, 2]
    assert history.changed(ALL, 1, 4).nonzero()[:, 0].tolist() == [1, 2, 5]
    assert not history.changed(ALL, 4, 4).any()
    assert history.changed(ALL, 0, 4).all(), "it does not know the first step any more"


def test_early_rows_and_what_has_changed_since_make_the_rows_of_now() -> None:
    shard = Shard(torch.zeros(ROWS, 1), num_ranks=1, timeout_s=10, alarm=lambda _: None)
    seen, early = shard.look_up_early(ALL, 0)
    shard.push(0, 0, rows(2, 6), {})
    total = shard.collect()
    shard.values[total.indices] += total.values
    shard.publish(1)
    places, values = shard.changed(ALL, seen, 1)
    assert places.tolist() == [2, 6]
    early[places] = values
    assert torch.equal(early, shard.values)


# -- optimizers -------------------------------------------------------------------------------------------------------


def tables() -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(ROWS, 3)), nn.Parameter(torch.randn(2, 2))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_a_twin_steps_as_the_optimizer_would_and_keeps_its_state_there(kind: Any) -> None:
    one, other = tables(), tables()
    expected, optimizer = kind(list(one), lr=0.1), kind([other[1]], lr=0.1)
    optimizer.add_param_group({"params": [other[0]], "lr": 0.1})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # it puts a step into the object
    found = group_of([optimizer], other[0])
    assert found == (optimizer, 1)
    twin = twin_of(optimizer, other[0], 1)
    for step in range(3):
        gradient = Rows(torch.tensor([1, step + 2]), torch.randn(2, 3, generator=torch.Generator().manual_seed(step)))
        one[0].grad = torch.sparse_coo_tensor(gradient.indices[None], gradient.values, (ROWS, 3), check_invariants=True)
        with torch.sparse.check_sparse_tensor_invariants(True), torch.no_grad():
            expected.step()
            twin(gradient, options_of(optimizer.param_groups[1]))
    assert torch.equal(other[0], one[0])
    assert other[0].grad is None, "nobody else sees it"
    assert optimizer.state[other[0]].keys() == expected.state[one[0]].keys()
    for name, value in expected.state[one[0]].items():
        assert torch.equal(torch.as_tensor(optimizer.state[other[0]][name]), torch.as_tensor(value))
    assert schedule.get_last_lr() == [0.1, 0.1]


def test_options_come_with_each_step() -> None:
    values = torch.zeros(ROWS, 1)
    optimizer = RowOptimizer(values, made_of(torch.optim.SGD, {"lr": 9.0, "initial_lr": 9.0}))
    for lr in (1.0, 0.5):
        optimizer(rows(2), {"lr": lr})
    assert values[2].item() == -1.5
    assert optimizer.state == {"momentum_buffer": None} or optimizer.state == {}


def test_options_are_values_that_json_has() -> None:
    (table, _) = tables()
    adam = torch.optim.SparseAdam([table], lr=torch.tensor(0.25), betas=(0.5, 0.75))
    adam.param_groups[0]["schedule"] = len
    assert options_of(adam.param_groups[0]) == {"lr": 0.25, "betas": [0.5, 0.75], "eps": 1e-8, "maximize": False}


def test_a_step_of_other_rows_is_refused() -> None:
    sgd = torch.optim.SGD([tables()[0]], lr=0.1, momentum=0.9)
    with pytest.raises(CombinationError, match=r"SGD\(momentum=0.9\) with staleness=4: .* write momentum=0"):
        refuse_wide_steps(sgd, options_of(sgd.param_groups[0]), "staleness=4")


# -- work beside training ---------------------------------------------------------------------------------------------


def outbox(timeout_s: float = 10.0, alarm: Callable[[float], str | None] = lambda _: None) -> Outbox:
    return Outbox("pushes", capacity=2, timeout_s=timeout_s, alarm=alarm)


def test_jobs_are_done_in_order_and_give_what_they_return() -> None:
    box, done = outbox(), list[int]()
    futures = [box.submit(lambda number=number: done.append(number) or number) for number in range(5)]
    assert [box.result(future) for future in futures] == done == list(range(5))
    box.close()
    box.close()


def test_who_brings_more_than_there_is_room_for_waits() -> None:
    box, gate = outbox(), threading.Event()
    for _ in range(2):
        box.submit(gate.wait)
    assert box.is_full
    with ThreadPoolExecutor(1) as pool:
        third: Future[Any] = pool.submit(box.submit, lambda: None)
        assert not wait([third], timeout=0.2).done
        gate.set()
        third.result(timeout=10)
    box.close()


def test_a_wait_for_room_in_the_outbox_has_a_deadline_and_heeds_alarms() -> None:
    for timeout_s, alarm, error, said in (
        (0.1, lambda _: None, CollectiveTimeoutError, r"waited 0.1 s .* 2 are under way \(sync.parameter_server.max_"),
        (10.0, lambda _: "rank 1 has ended", PeerLostError, "for pushes: rank 1 has ended"),
    ):
        box, gate = outbox(timeout_s, alarm), threading.Event()
        for _ in range(2):
            box.submit(gate.wait)
        with pytest.raises(error, match=said):
            box.submit(lambda: None)
        gate.set()
        box.close()


def test_after_a_failure_each_call_says_what_it_was() -> None:
    box = outbox()
    failed = box.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        box.result(failed)
    with pytest.raises(ZeroDivisionError):
        box.submit(lambda: None)
    box.close()
