"""Which server has which rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.gradsync.parameter_server.placement import STRIPES_PER_SERVER, Placement


@given(st.integers(0, 5000), st.integers(1, 9))
def test_each_row_is_on_one_server_at_one_place(num_rows: int, num_servers: int) -> None:
    placement = Placement.of(num_rows, num_servers)
    everything = torch.arange(num_rows)
    servers, positions = placement.server_of(everything), placement.position_of(everything)
    for server in range(num_servers):
        rows = placement.rows_of(server)
        assert torch.equal(rows, everything[servers == server]), "in ascending order"
        assert torch.equal(positions[rows], torch.arange(len(rows))), "without gaps"
        ranges = placement.ranges_of(server)
        assert len(ranges) <= STRIPES_PER_SERVER
        assert [row for low, high in ranges for row in range(low, high)] == rows.tolist()


@pytest.mark.parametrize("num_servers", [2, 4, 7])
def test_servers_have_about_as_many(num_servers: int) -> None:
    placement = Placement.of(1_000_003, num_servers)
    counts = [len(placement.rows_of(server)) for server in range(num_servers)]
    assert max(counts) - min(counts) <= placement.stripe_rows


def test_frequent_rows_do_not_all_go_to_the_first() -> None:
    """Ids that follow Zipf's law: each server is asked for between a tenth and half of a batch's rows."""
    uniform = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = (torch.exp(uniform * torch.log(torch.tensor(1_000_001.0))) - 1).long().unique()
    asked = torch.bincount(Placement.of(1_000_000, 4).server_of(rows), minlength=4) / len(rows)
    assert 0.1 < asked.min() <= asked.max() < 0.55
