"""Axes over ranks."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.errors import PlacementError, UnknownOptionError
from lightning_dist.topology.layout import AXIS_NAMES, DATA_AXES, Axes, Layout
from lightning_dist.topology.spec import Cluster, Tier
from tests.unit.topology.strategies import clusters


@st.composite
def axes_for(draw: st.DrawFn, size: int) -> Axes:
    sizes = []
    for _ in range(3):
        sizes.append(draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])))
        size //= sizes[-1]
    return Axes(*draw(st.permutations([*sizes, size])))


@given(st.data())
def test_groups_of_any_axes_partition_the_world(data: st.DataObject) -> None:
    cluster = data.draw(clusters())
    axes = data.draw(axes_for(cluster.world_size))
    chosen = data.draw(st.sets(st.sampled_from(AXIS_NAMES)))
    try:
        layout = Layout.place(cluster, axes)
    except PlacementError:
        assert any(size % axes.tp for size in cluster.ranks_per_host)
        return
    groups = layout.groups(*chosen)
    assert sorted(rank for group in groups for rank in group) == list(range(cluster.world_size))
    size = math.prod(s for name, s in zip(AXIS_NAMES, astuple(axes), strict=True) if name in chosen)
    assert {len(group) for group in groups} == {size}
    for group in groups:
        where = [layout.coordinates(rank)._asdict() for rank in group]
        for name in set(AXIS_NAMES) - chosen:
            assert len({coordinates[name] for coordinates in where}) == 1
        assert where == sorted(where, key=lambda c: tuple(c[name] for name in AXIS_NAMES))


@given(st.data())
def test_tp_never_leaves_a_host_nor_does_pp_where_it_fits(data: st.DataObject) -> None:
    cluster = data.draw(clusters())
    axes = data.draw(axes_for(cluster.world_size))
    if any(size % axes.tp for size in cluster.ranks_per_host):
        with pytest.raises(PlacementError, match="tp must stay inside a host"):
            Layout.place(cluster, axes)
        return
    layout = Layout.place(cluster, axes)
    assert all(cluster.tier_of(group) is Tier.HOST for group in layout.groups("tp"))
    if all(size % (axes.tp * axes.pp) == 0 for size in cluster.ranks_per_host):
        assert all(cluster.tier_of(group) is Tier.HOST for group in layout.groups("pp"))


@given(st.data())
def test_coordinates_and_ranks_are_inverse(data: st.DataObject) -> None:
    cluster = data.draw(clusters())
    layout = Layout.place(cluster, Axes(dp_shard=cluster.world_size))
    for rank in range(cluster.world_size):
        assert layout.rank_at(**layout.coordinates(rank)._asdict()) == rank


def test_pipelines_stay_inside_hosts_also_with_cyclic_ranks() -> None:
    layout = Layout.place(Cluster.parse("2x4:cyclic"), Axes(pp=2, dp_replicate=2, tp=2))
    assert layout.groups("tp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("pp") == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert layout.groups(*DATA_AXES) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.group_of(7, "pp") == (3, 7)


def test_a_wide_pipeline_crosses_hosts() -> None:
    layout = Layout.place(Cluster.parse("2x2"), Axes(pp=4))
    assert layout.groups("pp") == ((0, 1, 2, 3),)


def test_shards_fill_hosts_before_replicas_cross() -> None:
    layout = Layout.place(Cluster.parse("2x2:cyclic"), Axes(dp_replicate=2, dp_shard=2))
    assert layout.groups("dp_shard") == ((0, 2), (1, 3))
    assert layout.groups("dp_replicate") == ((0, 1), (2, 3))


def test_a_crossing_tp_names_the_groups_and_what_would_fit() -> None:
    with pytest.raises(PlacementError, match=r"\[2, 3\] on host0, host1; the cheapest legal placement is .*tp=1$"):
        Layout.place(Cluster.parse("3+1"), Axes(dp_shard=2, tp=2))
    with pytest.raises(PlacementError, match=r"cheapest legal placement is .*tp=4$"):
        Layout.place(Cluster.parse("2x4"), Axes(tp=8))


def test_rank_order_is_legal_where_tp_does_not_cross() -> None:
    assert Layout.in_rank_order(Cluster.parse("2x2"), Axes(dp_shard=2, tp=2)).order == (0, 1, 2, 3)
    with pytest.raises(PlacementError, match=r"the same axes fit if ranks are placed by host: use Layout\.place"):
        Layout.in_rank_order(Cluster.parse("2x2:cyclic"), Axes(dp_shard=2, tp=2))


def test_sizes_and_names_are_checked() -> None:
    with pytest.raises(PlacementError, match="at least 1"):
        Axes(pp=0)
    with pytest.raises(PlacementError, match="needs 3 ranks, the cluster has 4"):
        Layout.place(Cluster.parse("4"), Axes(pp=3))
    with pytest.raises(PlacementError, match="once"):
        Layout(Cluster.parse("2"), Axes(dp_shard=2), (0, 0))
    layout = Layout.place(Cluster.parse("4"), Axes(dp_shard=4))
    with pytest.raises(UnknownOptionError, match="axis"):
        layout.groups("dp")
    with pytest.raises(PlacementError, match="dp_shard=4 is out of range"):
        layout.rank_at(dp_shard=4)


def test_a_layout_describes_itself() -> None:
    layout = Layout.place(Cluster.parse("2x2"), Axes(dp_replicate=2, dp_shard=2))
    uses = layout.describe(gradient_bytes=100.0)
    assert [(use.axis, use.ranks, use.tier, use.bytes_per_rank) for use in uses] == [
        ("dp_replicate", (0, 2), Tier.WORLD, 50.0),
        ("dp_replicate", (1, 3), Tier.WORLD, 50.0),
        ("dp_shard", (0, 1), Tier.HOST, 100.0),
        ("dp_shard", (2, 3), Tier.HOST, 100.0),
    ]
    wide = Layout.place(Cluster.parse("4"), Axes(pp=2, tp=2)).describe(gradient_bytes=100.0, tp_bytes=8.0, pp_bytes=6.0)
    assert {use.axis: use.bytes_per_rank for use in wide} == {"pp": 3.0, "tp": 8.0}


def test_ten_thousand_ranks() -> None:
    layout = Layout.place(Cluster.uniform(1250, 8, order="cyclic"), Axes(pp=4, dp_replicate=25, dp_shard=50, tp=2))
    assert len(layout.groups("tp")) == 5000
    assert len(layout.groups(*DATA_AXES)) == 8
