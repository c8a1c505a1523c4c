"""Bytes a rank: against torch's own chunks and numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.errors import CombinationError, ConfigError, UnknownOptionError
from lightning_dist.planning.activation_cost import Activations
from lightning_dist.planning.memory_cost import Usage, memory_cost
from lightning_dist.planning.parameter_cost import padded_rows, shard_rows
from lightning_dist.planning.training import ADAMW, MODES, SGD, SGD_MOMENTUM, OptimizerStates, Parameter, TrainingSetup
from lightning_dist.topology.layout import Axes, Coordinates, Layout
from lightning_dist.topology.spec import Cluster
from tests.unit.planning.models import ITEMS, ODD, SHARDED_MODES, even_model, on_shard, setup_for

# -- rows -------------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 40), shards=st.integers(1, 12))
def test_rows_are_those_of_torchs_chunks(rows: int, shards: int) -> None:
    chunks = [len(chunk) for chunk in torch.empty(rows).chunk(shards)]
    expected = chunks + [0] * (shards - len(chunks))
    assert [shard_rows(rows, shards, index) for index in range(shards)] == expected
    assert padded_rows(rows, shards) == expected[0]


def test_ten_thousand_ranks() -> None:
    assert sum(shard_rows(8192, 10_000, index) for index in range(10_000)) == 8192
    model = tuple(Parameter(f"{i}.{j}", (8192, 1024), block=i) for i in range(80) for j in range(9))
    last = on_shard(model, setup_for("zero3", 10_000), 9_999)
    # one row of each is allocated everywhere; the last 1,808 ranks have nothing to optimize but count the steps
    assert last.rank.rest == Usage(
        parameters=720 * 1024 * 4, gradients=720 * 1024 * 4, optimizer=720 * 4, communication=0
    )
    assert last.worst.rest.optimizer == 720 * (2 * 1024 * 4 + 4)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_ddp_holds_everything() -> None:
    cost = memory_cost(ODD, setup_for("ddp", 4))
    assert cost.rank.rest == Usage(parameters=184 * 4, gradients=184 * 4, optimizer=2 * 184 * 4 + 4 * 4)
    assert cost.rank == cost.worst
    # the largest parameter, up.weight, while AdamW makes two tensors of its shape
    assert cost.rank.peak_moment == "optimizer step"
    assert cost.rank.peak == replace(cost.rank.rest, optimizer=cost.rank.rest.optimizer + 2 * 91 * 4)


def test_a_gradient_is_there_twice_on_its_way_into_its_bucket() -> None:
    cost = memory_cost(ODD, setup_for("ddp", 4, optimizer=SGD_MOMENTUM))
    assert cost.rank.peak_moment == "backward of block 0"
    assert cost.rank.peak == replace(cost.rank.rest, gradients=(184 + 91) * 4)


def test_under_accumulation_ddp_holds_gradients_beside_buckets() -> None:
    setups = [setup_for("ddp", 4, micro_batches=2, gradient_as_bucket_view=view) for view in (True, False)]
    peaks = [memory_cost(ODD, setup, activations=Activations(loss=10_000)).rank.peak for setup in setups]
    assert [peak.gradients + peak.communication for peak in peaks] == [(2 * 184 + 15) * 4] * 2


def test_ddp_without_views_has_gradients_and_buckets() -> None:
    cost = memory_cost(ODD, setup_for("ddp", 4, gradient_as_bucket_view=False))
    assert cost.rank.rest.gradients == cost.rank.rest.communication == 184 * 4


def test_shards_are_padded_and_optimizer_state_is_not() -> None:
    """Rows over 4 ranks: 13 are 4, 4, 4, 1 of 4; 5 are 2, 2, 1, 0 of 2; 3 are 1, 1, 1, 0 of 1."""
    padded = (4 * 7 + 4 + 2 * 13 + 1 * 5) * 4
    own = {0: 4 * 7 + 4 + 2 * 13 + 5, 2: 4 * 7 + 4 + 1 * 13 + 5, 3: 1 * 7 + 1}
    for mode in SHARDED_MODES:
        for index, values in own.items():
            rest = on_shard(ODD, setup_for(mode, 4), index).rank.rest
            assert rest == Usage(parameters=padded, gradients=padded, optimizer=2 * values * 4 + 4 * 4)


def test_zero3_at_its_peak() -> None:
    """Backward of block 0: root and block 0 whole, block 1's gradients in their buffer and, reduced, in its shard."""
    cost = on_shard(ODD, setup_for("zero3", 4), 3)
    root, block0, block1 = 1 * 5 * 4, (4 * 7 + 4) * 4, 2 * 13 * 4  # padded values of 4 ranks
    assert cost.rank.peak_moment == "backward of block 0"
    assert cost.rank.peak == Usage(
        parameters=(root + block0 + block1),
        copies=(root + block0) * 4,
        gradients=block1 + (15 + 91 + 13) * 4,
        optimizer=cost.rank.rest.optimizer,
        communication=block1 * 4,
    )


def test_zero1_gathers_all_and_accumulates_whole_gradients() -> None:
    setup, at_loss = setup_for("zero1", 4, micro_batches=3), Activations(loss=10_000)
    peak = memory_cost(ODD, setup, activations=at_loss).rank.peak
    padded = (4 * 7 + 4 + 2 * 13 + 1 * 5) * 4
    assert peak == Usage(
        parameters=padded, copies=padded * 4, gradients=184 * 4, optimizer=63 * 8 + 16, activations=10_000
    )
    # reduced in another type, accumulated gradients are not those that autograd makes: the head's come on top
    mixed = replace(setup, gathered_bytes=2, reduced_bytes=4)
    assert memory_cost(ODD, mixed, activations=at_loss).rank.peak.gradients == 184 * 4 + 15 * 2


def test_zero1_starts_all_gathers_before_forward() -> None:
    """Before and in forward what is whole and what is on its way add up to the model, and once more what is copied."""
    model = (*even_model(4), Parameter("head", (256, 128), trainable=False))
    cost = memory_cost(model, setup_for("zero1", 4)).rank
    assert cost.peak_moment == "gather of the root"
    assert cost.peak.copies == 2 * 128 * 128 * 4
    assert cost.peak.communication == (2 + 4) * 128 * 128 * 4


def test_a_frozen_block_holds_no_buffer_of_gradients() -> None:
    frozen = [p._replace(trainable=p.block != 2) for p in even_model(4)]
    cost = memory_cost(frozen, setup_for("zero3", 4)).rank
    assert cost.peak_moment == "backward of block 1"
    assert cost.peak.communication == 2 * 128 * 128 * 4  # block 0 gathered ahead, block 3 reduced


def test_more_reduction_buffers_take_more() -> None:
    model = even_model(8)
    one, three = (memory_cost(model, setup_for("zero3", 4, reduction_buffers=n)).rank.peak for n in (1, 3))
    assert three.communication - one.communication == 2 * 128 * 128 * 4


def test_more_blocks_ahead_take_more() -> None:
    model = even_model(8)
    one, three = (memory_cost(model, setup_for("zero3", 4, prefetch=n)).rank.peak for n in (1, 3))
    assert three.communication - one.communication == 2 * 128 * 128 * 4


def test_staging_is_there_all_the_time() -> None:
    plain, staged = (memory_cost(ODD, setup_for("ddp", 4, staging_bytes=n)).rank for n in (0, 100))
    assert staged.rest == replace(plain.rest, communication=100)
    assert staged.peak == replace(plain.peak, communication=100)


def test_what_is_frozen_has_no_gradient_and_no_state() -> None:
    frozen = tuple(p._replace(trainable=p.name != "up.weight") for p in ODD)
    for mode in MODES:
        some, every = (memory_cost(model, setup_for(mode, 1)).rank.rest for model in (frozen, ODD))
        assert some.parameters == every.parameters
        assert every.gradients - some.gradients == 91 * 4
        assert every.optimizer - some.optimizer == 91 * 8 + 4


@pytest.mark.parametrize(("optimizer", "per_value", "per_tensor"), [(SGD, 0, 0), (SGD_MOMENTUM, 4, 0), (ADAMW, 8, 4)])
def test_states_of_optimizers(optimizer: OptimizerStates, per_value: int, per_tensor: int) -> None:
    cost = memory_cost(ODD, setup_for("ddp", 1, optimizer=optimizer))
    assert cost.rank.rest.optimizer == 184 * per_value + 4 * per_tensor


def test_parameter_groups_may_differ() -> None:
    groups = {"up.weight": SGD_MOMENTUM, "down.weight": ADAMW, "up.bias": SGD}
    cost = memory_cost(ODD, setup_for("ddp", 1, optimizer=groups))
    assert cost.rank.rest.optimizer == 91 * 4 + 65 * 8 + 4


def test_a_0_dim_parameter_is_on_every_rank() -> None:
    cost = on_shard((Parameter("scale", ()), Parameter("weight", (2, 3))), setup_for("zero3", 2), 1)
    assert cost.rank.rest == Usage(parameters=4 + 12, gradients=4 + 12, optimizer=(8 + 4) + (24 + 4))


def test_parameters_of_another_type_than_most_are_on_every_rank() -> None:
    model = (Parameter("weight", (4, 5)), Parameter("codes", (4, 2), dtype_bytes=1, trainable=False))
    assert memory_cost(model, setup_for("zero3", 2)).rank.rest.parameters == 2 * 5 * 4 + 4 * 2
    assert memory_cost(model, setup_for("ddp", 2)).rank.rest.parameters == 4 * 5 * 4 + 4 * 2


def test_an_empty_rank_still_allocates_padding() -> None:
    cost = on_shard((Parameter("bias", (1,)),), setup_for("zero2", 3), 2)
    assert cost.rank.rest == Usage(parameters=4, gradients=4, optimizer=4)


def test_no_parameters_at_all() -> None:
    for mode in MODES:
        assert memory_cost((), setup_for(mode, 3)).worst.peak.total == 0


# -- precision --------------------------------------------------------------------------------------------------------


def test_true_16_bit_halves_everything_but_steps() -> None:
    for mode in MODES:
        full, half = (memory_cost(ODD, setup_for(mode, 3, precision=p)).rank for p in ("32-true", "bf16-true"))
        assert half.rest.total - 4 * 4 == (full.rest.total - 4 * 4) / 2
        assert half.peak.total - 4 * 4 == (full.peak.total - 4 * 4) / 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_keeps_fp32_and_copies_matrices(precision: str) -> None:
    at_loss = Activations(loss=10_000)
    plain, mixed = (
        memory_cost(ODD, setup_for("ddp", 1, precision=p), activations=at_loss).rank for p in ("32-true", precision)
    )
    assert mixed.rest == plain.rest
    assert mixed.peak == replace(plain.peak, copies=(184 - 13) * 2)


def test_gathering_in_16_bit_replaces_the_copies_of_autocast() -> None:
    model = even_model(8)
    wide, narrow = (
        memory_cost(model, setup_for("zero3", 4, precision="bf16-mixed", gathered_bytes=n)).rank for n in (None, 2)
    )
    assert narrow.rest == wide.rest
    assert narrow.peak.copies == 128 * 128 * 2
    assert narrow.peak.total < wide.peak.total


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def test_tp_cuts_before_shards_do() -> None:
    """(13, 7) cut at dim 1 by 2 is (13, 4) and (13, 3); over 3 shards 5 rows of each are allocated."""
    model = (Parameter("weight", (13, 7), tp_dim=1), Parameter("bias", (13,)))
    setup = setup_for("zero2", 3, axes=Axes(dp_shard=3, tp=2))
    assert on_shard(model, setup, 0, 0).rank.rest.parameters == (5 * 4 + 5) * 4
    assert on_shard(model, setup, 2, 1).rank.rest.parameters == (5 * 3 + 5) * 4
    assert on_shard(model, setup, 2, 1).rank.rest.optimizer == (3 * 3 + 3) * 8 + 2 * 4
    whole = memory_cost(model, setup_for("ddp", 2, axes=Axes(dp_replicate=1, tp=2)))
    assert whole.rank.rest.parameters == (13 * 4 + 13) * 4


def test_tensor_averages_what_it_holds_beside_it() -> None:
    """Blocks of 91 + 13 and 65 values and a root of 15; the first is cut by 2, bias and all."""
    model = tuple(p._replace(tp_dim=0) if p.block == 0 else p for p in ODD)
    axes = Axes(dp_replicate=2, tp=2)
    cost = on_shard(model, setup_for("tensor", 2, axes=axes, optimizer=SGD), 0, tp=1).rank
    own = 6 * 7 + 6 + 65 + 15  # 13 rows are 7 and 6
    assert cost.rest == Usage(parameters=own * 4, gradients=own * 4)
    # all means are there, and a copy of the first block's gradients that is still on its way
    assert cost.peak_moment == "averages"
    assert cost.peak == replace(cost.rest, communication=(own + 6 * 7 + 6) * 4)
    many = on_shard(model, setup_for("tensor", 2, axes=axes, optimizer=SGD, reduction_buffers=5), 0, tp=1).rank
    assert many.peak.communication == 2 * own * 4


def test_tensor_without_replicas_averages_nothing() -> None:
    setup = setup_for("tensor", 1, axes=Axes(tp=2), optimizer=SGD, micro_batches=3)
    cost = memory_cost(ODD, setup, activations=Activations(per_block=10, loss=7)).rank
    assert (cost.peak_moment, cost.peak) == ("loss", replace(cost.rest, activations=2 * 10 + 7))


def test_coordinates_come_from_a_layout() -> None:
    layout = Layout.place(Cluster.parse("2x4:cyclic"), Axes(dp_replicate=2, dp_shard=2, tp=2))
    setup = TrainingSetup(mode="hsdp", axes=layout.axes, optimizer=SGD_MOMENTUM)
    model = (Parameter("weight", (3, 5), tp_dim=1),)
    held = [memory_cost(model, setup, at=layout.coordinates(r)).rank.rest.optimizer // 4 for r in range(8)]
    assert sum(held) == 2 * 15  # each replica holds all of it once


# -- activations ------------------------------------------------------------------------------------------------------


def test_activations_grow_to_the_loss_and_shrink_in_backward() -> None:
    model, setup = even_model(4), setup_for("ddp", 1)
    kept = memory_cost(model, setup, activations=Activations(per_block=10**6, outside=10**5, loss=10**7)).rank
    assert kept.peak_moment == "loss"
    assert kept.peak.activations == 4 * 10**6 + 10**5 + 10**7
    assert kept.rest.activations == 0
    again = memory_cost(model, setup, activations=Activations(per_block=10, recomputed=10**6, outside=10**5)).rank
    assert again.peak_moment == "backward of block 3"
    assert again.peak.activations == 4 * 10 + 10**5 + 10**6


# -- what is refused, what is shown -----------------------------------------------------------------------------------


def test_wrong_names_and_values_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="zero4"):
        setup_for("zero4", 2)
    with pytest.raises(UnknownOptionError, match="precision"):
        setup_for("ddp", 2, precision="bf16")
    for name in ("gathered_bytes", "reduced_bytes", "prefetch", "reduction_buffers", "micro_batches"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
            setup_for("zero2", 2, **{name: 0})
    with pytest.raises(ConfigError, match="staging_bytes must be at least 0"):
        setup_for("ddp", 2, staging_bytes=-1)
    with pytest.raises(ConfigError, match="has no dim 1 for tp to cut"):
        memory_cost((Parameter("bias", (3,), tp_dim=1),), setup_for("ddp", 1, axes=Axes(tp=2)))


def test_what_does_not_go_together_is_refused() -> None:
    for mode in ("ddp", "tensor"):
        with pytest.raises(CombinationError, match=f"{mode} shards nothing over data"):
            setup_for(mode, 2, axes=Axes(dp_shard=2))
    with pytest.raises(CombinationError, match="ddp gathers nothing"):
        setup_for("ddp", 2, gathered_bytes=2)
    with pytest.raises(CombinationError, match="by zero3 only, not by zero2"):
        setup_for("zero2", 4, secondary_shards=2)
    with pytest.raises(CombinationError, match="tp cuts"):
        setup_for("zero3", 4, axes=Axes(dp_shard=4, tp=2), secondary_shards=2)
    with pytest.raises(ConfigError, match="allowed: 2, 3"):
        setup_for("zero3", 6, secondary_shards=4)
    with pytest.raises(ConfigError, match="allowed: none"):
        setup_for("zero3", 5, secondary_shards=5)


def test_a_cost_prints_itself() -> None:
    text = str(memory_cost(even_model(4), setup_for("zero3", 4), at=Coordinates(0, 0, 3, 0)))
    lines = text.splitlines()
    assert lines[0] == "zero3, pp=1 dp_replicate=1 dp_shard=4 tp=1, 32-true, 1 micro-batches a step"
    assert lines[1].split("  ")[0] == "MB a rank"
    assert [line.split()[0] for line in lines[2:9]] == ITEMS
    assert len({len(line) for line in lines[1:9]}) == 1
    assert lines[2].split() == ["parameters", "0.07", "0.07", "0.07", "0.07"]
    assert lines[-1] == "peak: backward of block 1; worst: backward of block 1"
