"""Local SGD without ranks: when what is sent, how parameters are dealt, what the outer optimizer does."""

from __future__ import annotations

import pytest
import torch

from lightning_dist.config import LocalSGDConfig
from lightning_dist.errors import ConfigError
from lightning_dist.gradsync.local_sgd import OuterOptimizer, Timetable
from lightning_dist.gradsync.local_sgd.fragments import deal
from lightning_dist.gradsync.local_sgd.outer import mix


def test_each_fragment_is_sent_once_a_period_at_even_distances() -> None:
    table = Timetable(every=12, fragments=3, warmup_steps=5)
    sent = {step: table.sent_at(step) for step in range(1, 42) if table.sent_at(step)}
    assert sent == {9: (0,), 13: (1,), 17: (2,), 21: (0,), 25: (1,), 29: (2,), 33: (0,), 37: (1,), 41: (2,)}
    assert [step for step in range(1, 10) if table.is_exact(step)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (7, 3), (8, 8), (100, 7), (5, 4)])
def test_any_period_has_each_fragment_once(every: int, fragments: int) -> None:
    table = Timetable(every=every, fragments=fragments)
    for start in (1, 4, 10):
        sent = [fragment for step in range(start, start + every) for fragment in table.sent_at(step)]
        assert sorted(sent) == list(range(fragments))
    assert table.sent_at(every)[-1] == fragments - 1


def test_what_is_sent_arrives_later() -> None:
    assert Timetable(every=10, overlap_steps=4).arrives_at(10) == 14
    assert Timetable(every=10).arrives_at(10) == 10


def test_equal_layers_go_round_the_fragments() -> None:
    layer = [40, 4, 4]  # a matrix and its small ones stay together
    dealt = deal(layer * 12, 3)
    assert [dealt[3 * i] for i in range(12)] == [0, 1, 2] * 4
    assert all(len(set(dealt[3 * i : 3 * i + 3])) == 1 for i in range(12))


@pytest.mark.parametrize("fragments", [1, 2, 5])
def test_fragments_are_of_about_equal_bytes(fragments: int) -> None:
    sizes = [(7919 * i) % 97 + 1 for i in range(200)]
    loads = [0] * fragments
    for size, at in zip(sizes, deal(sizes, fragments), strict=True):
        loads[at] += size
    assert max(loads) - min(loads) < sum(sizes) / fragments / 4 + 97


def test_few_parameters_leave_no_fragment_empty_that_could_have_one() -> None:
    assert sorted(deal([1000, 1, 1], 3)) == [0, 1, 2]
    assert deal([1000, 1], 4) == [0, 1]
    assert deal([], 2) == []


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, True), (0.9, False)])
def test_the_outer_optimizer_is_torchs(momentum: float, nesterov: bool) -> None:
    theirs = torch.nn.Parameter(torch.arange(5.0))
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=momentum, nesterov=nesterov)
    ours, kept = torch.arange(5.0), torch.zeros(5) if momentum else None
    for step in range(4):
        theirs.grad = torch.randn(5, generator=torch.Generator().manual_seed(step))
        OuterOptimizer(0.7, momentum, nesterov).step(ours, kept, theirs.grad.clone())
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)


def test_outer_weights_of_a_half_type_are_rounded_once() -> None:
    outer = torch.full((3,), 1.0, dtype=torch.bfloat16)
    OuterOptimizer(1.0, 0.0, False).step(outer, None, torch.full((3,), 0.01))
    assert torch.equal(outer, torch.full((3,), 0.99).to(torch.bfloat16))


def test_own_weights_are_replaced_or_mixed() -> None:
    own = torch.full((2,), 4.0)
    mix(own, torch.full((2,), 2.0), 0.25)
    assert own.tolist() == [2.5, 2.5]
    mix(own, torch.full((2,), 2.0), 0.0)
    assert own.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "sync.local_sgd.every"),
        ({"every": 4, "fragments": 5}, "write fragments=4"),
        ({"every": 4, "overlap_steps": 4}, "write overlap_steps=3"),
        ({"mixing": 1.0}, "sync.local_sgd.mixing"),
        ({"workers": "nodes"}, "allowed: hosts, ranks"),
        ({"outer_momentum": 1}, "sync.local_sgd.outer_momentum"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        LocalSGDConfig(**options)  # type: ignore[arg-type]


def test_half_of_the_own_weights_stays_where_steps_are_made_meanwhile() -> None:
    assert LocalSGDConfig().kept == 0.0
    assert LocalSGDConfig(overlap_steps=2).kept == 0.5
    assert LocalSGDConfig(overlap_steps=2, mixing=0.0).kept == 0.0
