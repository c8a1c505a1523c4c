"""What is owed: added once, kept by parameter, and never lost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.comm.codecs import Codec, codec_of
from lightning_dist.comm.feedback import Account, Feedback, Origin, Place, Span
from lightning_dist.config import SyncConfig

CPU = torch.device("cpu")


def onebit() -> Codec:
    codec = codec_of(SyncConfig(codec="onebit"))
    assert codec is not None
    return codec


def feedback(layout: str = "here", *, rank: int = 0, warmup_steps: int = 0, keeps: bool = True) -> Feedback:
    return Feedback(layout=layout, rank=rank, warmup_steps=warmup_steps, keeps=keeps)


def whole(rows: torch.Tensor, kind: str = "part", unit: float = 1.0) -> Place:
    """All of a tensor, in rows."""
    length = rows.shape[1]
    return Place(kind, tuple(row * length for row in range(rows.shape[0])), rows.numel(), unit)


def send(account: Account, values: torch.Tensor) -> torch.Tensor:
    rows = values.view(2, -1)
    return onebit().decode(account.encode(onebit(), rows, whole(rows)), rows.shape[1]).reshape(-1)


def total(owed: dict[str, list[tuple[int, torch.Tensor]]], name: str, length: int) -> torch.Tensor:
    out = torch.zeros(length)
    for low, values in owed.get(name, []):
        out[low : low + len(values)] += values
    return out


def noise(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


TWO = Origin("a", (Span("x", 0, 300), Span(None, 0, 4), Span("y", 10, 296)), 0.25)


def test_what_was_sent_and_what_is_owed_is_what_was_given() -> None:
    owing, given_, sent = feedback(), torch.zeros(600), torch.zeros(600)
    for step in range(20):
        values = noise(600, step)
        given_ += values
        sent += send(owing.enter(TWO, values), values)
    owed = owing.owed()
    torch.testing.assert_close(0.25 * (given_ - sent)[:300], total(owed, "x", 300), rtol=0, atol=1e-4)
    torch.testing.assert_close(0.25 * (given_ - sent)[304:], total(owed, "y", 306)[10:], rtol=0, atol=1e-4)
    assert owing.window == 19


def test_without_feedback_nothing_is_owed() -> None:
    owing = feedback(keeps=False)
    values = noise(600, 0)
    send(owing.enter(TWO, values), values)
    assert owing.owed() == {}


def test_the_first_synchronisations_are_exact() -> None:
    owing = feedback(warmup_steps=2)
    said = [[owing.enter(Origin(key, (), 1.0), torch.empty(0)).is_exact for key in "abc"] for _ in range(4)]
    assert said == [[True] * 3, [True] * 3, [False] * 3, [False] * 3]


def test_a_tensor_of_other_parameters_gets_what_is_owed_of_them_once() -> None:
    owing = feedback()
    values = noise(600, 0)
    send(owing.enter(TWO, values), values)
    before = owing.owed()
    other = Origin("a", (Span("y", 0, 400), Span("x", 100, 100)), 0.5)
    tensor = torch.zeros(500)
    owing.enter(other, tensor)
    torch.testing.assert_close(tensor[:400], total(before, "y", 400) / 0.5)
    torch.testing.assert_close(tensor[400:], total(before, "x", 300)[100:200] / 0.5)
    again = torch.zeros(500)
    owing.enter(other, again)
    assert not again.any()
    left = total(owing.owed(), "x", 300)
    assert not left[100:200].any()
    assert torch.equal(left[:100], total(before, "x", 300)[:100])


def test_the_account_of_a_tensor_that_does_not_come_any_more_is_dissolved() -> None:
    owing = feedback()
    for key in ("a", "b"):
        values = noise(600, 0)
        send(owing.enter(Origin(key, (Span(key, 0, 600),), 1.0), values), values)
    before = owing.owed()
    for _ in range(2):
        owing.enter(Origin("a", (Span("a", 0, 600),), 1.0), torch.zeros(600))
    tensor = torch.zeros(600)
    owing.enter(Origin("c", (Span("b", 0, 600),), 1.0), tensor)
    assert torch.equal(tensor, total(before, "b", 600))


def test_residues_of_sums_count_by_their_unit() -> None:
    account = Account(Origin("a", (Span("x", 0, 300),), 0.25))
    rows = noise(300, 0).view(1, 300)
    lost = rows - onebit().decode(account.encode(onebit(), rows, whole(rows, "sum", 4.0)), 300)
    ((name, low, values),) = account.dissolved()
    assert (name, low) == ("x", 0)
    torch.testing.assert_close(values, lost[0])


def test_padding_is_not_owed_to_anyone() -> None:
    account = Account(Origin("a", (Span("x", 0, 5),), 1.0))
    rows = noise(6, 0).view(2, 3)
    account.encode(onebit(), rows, Place("part", (0, 3), 5, 1.0))
    assert [(name, low, len(values)) for name, low, values in account.dissolved()] == [("x", 0, 3), ("x", 3, 2)]


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_one_step_that_is_not_finite_does_not_spoil_those_after_it(poison: float) -> None:
    owing = feedback()
    values = noise(600, 0)
    values[7] = poison
    assert not send(owing.enter(TWO, values), values)[7].isfinite()
    values = noise(600, 1)
    assert send(owing.enter(TWO, values), values).isfinite().all()


def test_a_rank_goes_on_as_if_it_had_not_stopped() -> None:
    straight, stopped = feedback(), feedback()
    for step in range(6):
        if step == 3:
            saved = stopped.state_dict()
            stopped = feedback()
            stopped.load_state_dicts([saved], CPU)
        a, b = noise(600, step), noise(600, step)
        assert torch.equal(send(straight.enter(TWO, a), a), send(stopped.enter(TWO, b), b))
    assert stopped.window == straight.window


@given(before=st.integers(1, 5), after=st.integers(1, 5), layout=st.sampled_from(["here", "there"]))
@settings(max_examples=20, deadline=None)
def test_other_ranks_take_over_all_that_is_owed(before: int, after: int, layout: str) -> None:
    """Whatever their number: the sum of what is owed stays, and comes out in the units of the new tensors."""
    saved, owed = [], torch.zeros(300)
    for rank in range(before):
        owing = feedback(rank=rank)
        values = noise(600, rank)
        send(owing.enter(TWO, values), values)
        owed += total(owing.owed(), "x", 300)
        saved.append(owing.state_dict())
    found = torch.zeros(300)
    for rank in range(after):
        owing = feedback(layout, rank=rank)
        owing.load_state_dicts(saved[rank::after], CPU)
        tensor = torch.zeros(300)
        owing.enter(Origin("other", (Span("x", 0, 300),), 1 / after), tensor)
        left = total(owing.owed(), "x", 300)
        found += tensor / after + left
    torch.testing.assert_close(found, owed, rtol=0, atol=1e-5)


def test_what_is_owed_follows_the_scale_of_gradients_and_is_saved_with_it() -> None:
    """As if there was no scale: times powers of two everything is the same to the bit."""
    plain, scaled, scale = feedback(), feedback(), torch.tensor(4.0)
    scaled.scale_of = lambda: scale
    for step in range(8):
        if step in (2, 5):
            scale = torch.tensor(16.0 if step == 2 else 0.5)
        if step == 4:
            saved = scaled.state_dict()
            assert saved["scale"] == 16.0
            scaled = feedback()
            scaled.load_state_dicts([saved], CPU)
            torch.testing.assert_close(total(scaled.owed(), "x", 300), total(plain.owed(), "x", 300), rtol=0, atol=0)
            scaled.scale_of = lambda: scale  # noqa: B023  # the present one
        a, b = noise(600, step), noise(600, step) * scale
        assert torch.equal(send(plain.enter(TWO, a), a) * scale, send(scaled.enter(TWO, b), b))


# -- momentum ----------------------------------------------------------------------------------------------------------

ONE = Origin("a", (Span("x", 0, 40),), 0.5)


def topk() -> Codec:
    codec = codec_of(SyncConfig(codec="topk", ratio=0.1))
    assert codec is not None
    return codec


def send_largest(account: Account, values: torch.Tensor) -> torch.Tensor:
    if account.is_exact:
        return account.accelerated(values.view(1, -1), Place("part", (0,), len(values), 1.0))[0]
    encoded = account.encode(topk(), values.view(1, -1), Place("part", (0,), len(values), 1.0))
    return topk().decode(encoded, len(values))[0]


def test_momentum_is_taken_before_anything_is_left_out_and_begins_anew_where_it_was_sent() -> None:
    """Against the formulas of Deep Gradient Compression."""
    owing = Feedback(layout="here", rank=0, momentum=0.9)
    u, v = torch.zeros(40), torch.zeros(40)
    for step in range(12):
        values = noise(40, step)
        sent = send_largest(owing.enter(ONE, values.clone()), values)
        u = 0.9 * u + values
        v = v + u
        places = v.abs().topk(4).indices
        expected = torch.zeros(40).index_copy_(0, places, v[places])
        u[places], v[places] = 0, 0
        torch.testing.assert_close(sent, expected)
    torch.testing.assert_close(total(owing.owed(), "x", 40), 0.5 * v)


def test_exact_synchronisations_with_momentum_are_those_of_sgd_with_momentum() -> None:
    """Also where tensors are laid out anew on the way, and by another rank's hand."""
    owing, weights = Feedback(layout="here", rank=0, momentum=0.9, warmup_steps=100), torch.zeros(40)
    reference = torch.zeros(40, requires_grad=True)
    optimizer = torch.optim.SGD([reference], lr=1.0, momentum=0.9)
    for step in range(12):
        if step == 4:
            saved, owing = owing.state_dict(), Feedback(layout="there", rank=1, momentum=0.9, warmup_steps=100)
            owing.load_state_dicts([saved], CPU)
        if step == 8:
            saved, owing = owing.state_dict(), Feedback(layout="there", rank=1, momentum=0.9, warmup_steps=100)
            owing.load_state_dicts([saved], CPU)
        values = noise(40, step)
        reference.grad = values.clone()
        optimizer.step()
        origin = ONE if step < 4 else Origin("b", (Span("x", 0, 40),), 1.0)
        tensor = values * (0.5 / origin.weight) * 2  # of weight 0.5, two ranks have the same
        if step < 4:
            tensor = values.clone() * 2
        weights -= origin.weight * send_largest(owing.enter(origin, tensor), tensor)
    torch.testing.assert_close(weights, reference.detach())


def test_where_nothing_is_lost_momentum_is_taken_and_what_is_owed_is_added_once() -> None:
    """As on the one host that is left of several."""
    lossy = Feedback(layout="here", rank=0, momentum=0.9)
    for step in range(3):
        values = noise(40, step)
        send_largest(lossy.enter(ONE, values), values)
    owed, velocity = total(lossy.owed(), "x", 40), torch.zeros(40)
    for _, rows in lossy._accounts["a"].velocities.values():
        velocity += 0.5 * rows[0]
    exact = Feedback(layout="there", rank=0, momentum=0.9, loses=False)
    exact.load_state_dicts([lossy.state_dict()], CPU)
    for step in range(3):
        tensor = noise(40, 10 + step)
        velocity = 0.9 * velocity + 0.5 * tensor
        exact.enter(ONE, tensor)
        torch.testing.assert_close(0.5 * tensor, velocity + owed)
        owed = torch.zeros(40)


def test_what_is_owed_comes_not_under_momentum_once_more() -> None:
    owing = Feedback(layout="here", rank=0, momentum=0.9)
    for step in range(3):
        values = noise(40, step)
        send_largest(owing.enter(ONE, values), values)
    owed = total(owing.owed(), "x", 40)
    there = Feedback(layout="there", rank=0, momentum=0.9)
    there.load_state_dicts([owing.state_dict()], CPU)
    applied = torch.zeros(40)
    velocity = torch.zeros(40)
    for _, rows in owing._accounts["a"].velocities.values():
        velocity += 0.5 * rows[0]
    expected = owed.clone()
    for step in range(200):
        tensor = torch.zeros(40)
        account = there.enter(ONE, tensor)
        assert account.is_exact == (step == 0)
        applied += 0.5 * send_largest(account, tensor)
        if step == 0:
            torch.testing.assert_close(applied, expected + 0.9 * velocity)
    assert (applied + total(there.owed(), "x", 40) - expected).norm() <= 9 * velocity.norm() * (1 + 1e-5)


def test_a_rank_with_momentum_goes_on_as_if_it_had_not_stopped() -> None:
    straight, stopped = (Feedback(layout="here", rank=0, momentum=0.9) for _ in range(2))
    for step in range(6):
        if step == 3:
            saved = stopped.state_dict()
            stopped = Feedback(layout="here", rank=0, momentum=0.9)
            stopped.load_state_dicts([saved], CPU)
        a, b = noise(40, step), noise(40, step)
        assert torch.equal(send_largest(straight.enter(ONE, a), a), send_largest(stopped.enter(ONE, b), b))


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_velocity_stays_finite(poison: float) -> None:
    owing = Feedback(layout="here", rank=0, momentum=0.9)
    values = noise(40, 0)
    values[3:30] = poison
    assert not send_largest(owing.enter(ONE, values), values).isfinite().all()
    values = noise(40, 1)
    assert send_largest(owing.enter(ONE, values), values).isfinite().all()
