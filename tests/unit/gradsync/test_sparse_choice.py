"""When a whole table is cheaper than its rows."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dist.gradsync.sparse.choice import limit_of
from lightning_dist.gradsync.sparse.rows import Table
from lightning_dist.laws import hierarchical_bytes_per_host, row_break_even_share, row_exchange_bytes_per_host

TABLE = Table((1000, 64), torch.float32)


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_bytes_alone_decide_on_a_slow_link(hosts: int) -> None:
    share = row_break_even_share(256, 4, rate_bytes_per_s=1.0)
    assert share == pytest.approx(256 / 260)
    rows = row_exchange_bytes_per_host(share * 1000, share * 1000, 260, hosts)
    whole = hierarchical_bytes_per_host(1000 * 256, hosts)
    assert rows == pytest.approx(whole), "at the limit both send the same"


def test_merging_decides_on_a_fast_link() -> None:
    fast = row_break_even_share(256, 4, rate_bytes_per_s=1e12)
    assert fast == pytest.approx(0.25 / 1.5, rel=0.01)
    assert (
        fast < row_break_even_share(256, 4, rate_bytes_per_s=1e9) < row_break_even_share(256, 4, rate_bytes_per_s=1e8)
    )


def test_short_rows_are_sent_whole_earlier() -> None:
    assert row_break_even_share(4, 4, rate_bytes_per_s=1e6) == pytest.approx(0.5, abs=0.01)


def test_what_a_host_sends() -> None:
    assert row_exchange_bytes_per_host(100, 150, 260, 1) == 0
    assert row_exchange_bytes_per_host(100, 150, 260, 2) == 100 * 260
    assert row_exchange_bytes_per_host(100, 150, 260, 4) == pytest.approx(0.75 * 250 * 260)


def test_a_row_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="row_bytes must be positive"):
        row_break_even_share(0, 4, rate_bytes_per_s=1e9)


def test_the_reason_says_what_is_known() -> None:
    assumed = limit_of(TABLE, given=None, rate_bytes_per_s=None, crosses=True)
    measured = limit_of(TABLE, given=None, rate_bytes_per_s=5e9, crosses=True)
    assert assumed.reason.endswith("125 MB/s, assumed")
    assert measured.reason.endswith("5,000 MB/s, measured")
    assert measured.share < assumed.share < 1
    assert limit_of(TABLE, given=None, rate_bytes_per_s=None, crosses=False).share < assumed.share


def test_what_the_user_says_holds() -> None:
    always = limit_of(TABLE, given=0, rate_bytes_per_s=None, crosses=True)
    assert always.is_dense(0.0, was_dense=False)
    never = limit_of(TABLE, given=1, rate_bytes_per_s=None, crosses=True)
    assert never.share == math.inf
    assert not never.is_dense(1.0, was_dense=False)


def test_the_way_does_not_change_at_each_step() -> None:
    limit = limit_of(TABLE, given=0.5, rate_bytes_per_s=None, crosses=True)
    assert limit.is_dense(0.5, was_dense=False)
    assert limit.is_dense(0.45, was_dense=True)
    assert not limit.is_dense(0.45, was_dense=False)
    assert not limit.is_dense(0.39, was_dense=True)
