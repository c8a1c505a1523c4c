"""The batch at another number of ranks: exact where it can be, the nearest where not, never more than memory holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.elastic.policy.resize import Batch, resize
from lightning_dist.errors import ConfigError

SIZES = st.builds(Batch, st.integers(1, 64), st.integers(1, 32), st.integers(1, 8))


@pytest.mark.parametrize(
    ("reference", "ranks", "expected"),
    [
        (Batch(4, 8), 2, Batch(2, 8, 2)),
        (Batch(4, 8), 1, Batch(1, 8, 4)),
        (Batch(2, 8, 2), 4, Batch(4, 8, 1)),
        (Batch(4, 8), 8, Batch(8, 4, 1)),  # no accumulation to take back: micro-batches shrink
        (Batch(4, 6), 3, Batch(3, 4, 2)),  # 8 a rank, in two passes: one would need more memory
        (Batch(4, 8), 4, Batch(4, 8, 1)),
    ],
)
def test_the_global_batch_stays_by_accumulation(reference: Batch, ranks: int, expected: Batch) -> None:
    resized = resize(reference, ranks)
    assert resized.batch == expected
    assert resized.is_exact
    assert resized.rate_factor == 1


def test_the_nearest_is_said_to_be_no_more_than_that() -> None:
    resized = resize(Batch(4, 8), 3)
    assert resized.batch == Batch(3, 5, 2)
    assert not resized.is_exact
    assert resized.sentence == (
        "4 -> 3 ranks: global batch 32 -> 30 samples (3 ranks x 5 samples x 2 passes); 32 cannot be kept exactly on "
        "3 ranks, this is the nearest; the learning rate stays"
    )


def test_where_the_size_of_batches_is_unknown_it_speaks_of_batches() -> None:
    said = resize(Batch(4, 1), 2, fixed_micro_batch=True).sentence
    assert said == "4 -> 2 ranks: the global batch stays 4 batches (2 ranks x 2 passes); the learning rate stays"


def test_with_fixed_micro_batches_only_passes_change() -> None:
    assert resize(Batch(4, 8, 3), 3, fixed_micro_batch=True).batch == Batch(3, 8, 4)
    nearest = resize(Batch(4, 8), 3, fixed_micro_batch=True)
    assert nearest.batch == Batch(3, 8, 1)
    assert not nearest.is_exact


@pytest.mark.parametrize(("rate", "factor"), [("linear", 0.5), ("sqrt", math.sqrt(0.5)), ("none", 1.0)])
def test_the_learning_rate_follows_the_global_batch(rate: str, factor: float) -> None:
    resized = resize(Batch(4, 8, 2), 2, mode="per_rank", rate=rate)
    assert resized.batch == Batch(2, 8, 2)
    assert resized.rate_factor == factor
    assert resized.is_exact
    assert ("(linear)" in resized.sentence) == (rate == "linear")


@given(reference=SIZES, ranks=st.integers(1, 64), is_fixed=st.booleans())
def test_micro_batches_never_grow_and_what_can_be_exact_is(reference: Batch, ranks: int, is_fixed: bool) -> None:
    resized = resize(reference, ranks, fixed_micro_batch=is_fixed)
    batch, wanted = resized.batch, reference.global_size
    assert batch.ranks == ranks
    assert batch.micro_batch <= reference.micro_batch
    assert not is_fixed or batch.micro_batch == reference.micro_batch
    unit = ranks * (reference.micro_batch if is_fixed else 1)
    assert resized.is_exact == (wanted % unit == 0) == (batch.global_size == wanted)
    # One pass more or less of whole micro-batches is always to be had.
    assert abs(batch.global_size - wanted) <= max(ranks * reference.micro_batch / 2, unit - wanted)


@given(reference=SIZES, is_fixed=st.booleans())
def test_back_at_its_own_size_a_batch_is_itself(reference: Batch, is_fixed: bool) -> None:
    assert resize(reference, reference.ranks, fixed_micro_batch=is_fixed).batch == reference


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranks"):
        resize(Batch(2, 2), 0)
    with pytest.raises(ConfigError, match=r"elastic\.batch.*keep"):
        resize(Batch(2, 2), 1, mode="kep")
