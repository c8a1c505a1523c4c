"""Servers and clients of rows, several in one process, each rank in a thread."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_dist import wire
from lightning_dist.errors import CollectiveTimeoutError, PeerLostError
from lightning_dist.gradsync.parameter_server.client import RowClient, ServedTable, Wanted
from lightning_dist.gradsync.parameter_server.placement import Placement
from lightning_dist.gradsync.parameter_server.requests import RowRequests
from lightning_dist.gradsync.parameter_server.server import ROLES, RowServer, listening
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.sparse.rows import Rows, Table

NUM_ROWS, RANKS = 300, 3
TABLE = Table((NUM_ROWS, 2), torch.float32)
SECRET = b"s" * 32
WHOLE = torch.arange(2.0 * NUM_ROWS).view(NUM_ROWS, 2)


def shard_of(rank: int, timeout_s: float = 10.0, alarm: Callable[[float], str | None] = lambda _: None) -> Shard:
    values = WHOLE[Placement.of(NUM_ROWS, RANKS).rows_of(rank)].clone()
    return Shard(values, num_ranks=RANKS, timeout_s=timeout_s, alarm=alarm)


@contextlib.contextmanager
def servers(shards: list[Shard]) -> Iterator[list[RowServer]]:
    with contextlib.ExitStack() as stack:
        opened = []
        for shard in shards:
            requests = functools.partial(RowRequests, [shard], [TABLE])
            server = RowServer(listening("127.0.0.1"), secret=SECRET, answers=lambda make=requests: make().answer)
            stack.callback(server.close)
            stack.callback(shard.end, "it was closed")
            opened.append(server)
        yield opened


@contextlib.contextmanager
def cluster(shards: list[Shard]) -> Iterator[tuple[list[RowClient], list[ServedTable]]]:
    with servers(shards) as opened, contextlib.ExitStack() as stack:
        addresses = [("127.0.0.1", server.port) for server in opened]
        clients = []
        for rank in range(RANKS):
            client = RowClient(addresses, rank=rank, secret=SECRET, timeout_s=10)
            stack.callback(client.close)
            clients.append(client)
        placement = Placement.of(NUM_ROWS, RANKS)
        yield clients, [ServedTable(0, TABLE, placement, shard) for shard in shards]


def pulled(client: RowClient, served: ServedTable, rows: torch.Tensor, *, version: int | None) -> torch.Tensor:
    (values,) = client.pull([Wanted(served, rows)], version=version)
    return values


def on_all_ranks(run: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def test_rows_are_looked_up_wherever_they_are() -> None:
    rows = torch.tensor([0, 1, 2, 7, 150, 299])
    with cluster([shard_of(rank) for rank in range(RANKS)]) as (clients, tables):
        for client, served in zip(clients, tables, strict=True):
            assert torch.equal(pulled(client, served, rows, version=0), WHOLE[rows])
            assert pulled(client, served, rows[:0], version=0).shape == (0, 2)


def test_a_step_takes_the_gradients_of_all_ranks_and_the_next_look_up_sees_it() -> None:
    """Two steps; rank r adds r + 1 to rows of its own and one that all have; rank 1 has none in the second."""

    def gradients(rank: int, step: int) -> Rows:
        rows = torch.tensor([] if rank == 1 and step == 1 else sorted({rank, 10 + rank + step, 200}), dtype=torch.int64)
        return Rows(rows, torch.full((len(rows), 2), rank + 1.0))

    with cluster([shard_of(rank) for rank in range(RANKS)]) as (clients, tables):

        def train(rank: int) -> torch.Tensor:
            client, served = clients[rank], tables[rank]
            for step in range(2):
                pulled(client, served, torch.tensor([200]), version=step)
                client.push([(served, gradients(rank, step), {})], step=step)
                total = served.own.collect()
                served.own.values[total.indices] += total.values
                served.own.publish(step + 1)
            return pulled(client, served, torch.arange(NUM_ROWS), version=2)

        expected = WHOLE.clone()
        for step in range(2):
            for rank in range(RANKS):
                some = gradients(rank, step)
                expected[some.indices] += some.values
        for got in on_all_ranks(train):
            assert isinstance(got, torch.Tensor)
            assert torch.equal(got, expected)


def test_a_look_up_waits_for_the_step_that_it_asks_for() -> None:
    shard = shard_of(0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shard.look_up, torch.tensor([0]), 1)
        shard.values += 1
        shard.publish(1)
        assert asked.result(timeout=10).tolist() == [[1.0, 2.0]]


def test_waits_end_at_the_deadline_at_an_alarm_and_with_the_server() -> None:
    with pytest.raises(
        CollectiveTimeoutError, match=r"waited 0.1 s \(sync.timeout_s\) at a parameter server for step 1"
    ):
        shard_of(0, timeout_s=0.1).look_up(torch.tensor([0]), 1)
    with pytest.raises(PeerLostError, match="for the gradients of all ranks: rank 2 has ended"):
        shard_of(0, alarm=lambda _: "rank 2 has ended").collect()
    ended = shard_of(0)
    ended.end("it was closed")
    with pytest.raises(PeerLostError, match="the parameter server has ended: it was closed"):
        ended.look_up(torch.tensor([0]), 1)


def test_a_server_that_gives_up_says_so_to_who_asked() -> None:
    shards = [shard_of(rank, timeout_s=0.2) for rank in range(RANKS)]
    with cluster(shards) as (clients, tables):
        of_rank_1 = Placement.of(NUM_ROWS, RANKS).rows_of(1)[:1]
        with pytest.raises(PeerLostError, match=r"the parameter server of rank 1 says: waited 0.2 s"):
            pulled(clients[0], tables[0], of_rank_1, version=7)


def test_a_server_that_is_gone_is_an_error_of_the_connection() -> None:
    shards = [shard_of(rank) for rank in range(RANKS)]
    with servers(shards) as opened:
        addresses = [("127.0.0.1", server.port) for server in opened]
        client = RowClient(addresses, rank=0, secret=SECRET, timeout_s=10)
        opened[1].close()
        served = ServedTable(0, TABLE, Placement.of(NUM_ROWS, RANKS), shards[0])
        with pytest.raises(OSError, match=r"closed the connection|reset|Broken pipe"):
            pulled(client, served, torch.arange(NUM_ROWS), version=0)
        client.close()
        client.close()


def test_who_does_not_know_the_secret_learns_nothing() -> None:
    shards = [shard_of(rank) for rank in range(RANKS)]
    with servers(shards) as opened:
        addresses = [("127.0.0.1", server.port) for server in opened]
        with pytest.raises(OSError, match=r"does not know the secret|closed the connection|reset"):
            RowClient(addresses, rank=0, secret=b"x" * 32, timeout_s=5)


@pytest.mark.parametrize(
    "asked",
    [
        {"op": "drop", "parts": []},
        {"op": "pull", "parts": [[9, 0]], "version": 0},
        {"op": "pull", "parts": [[-1, 0]], "version": 0},
        {"op": "pull", "parts": [[0, 0], [0, 0]], "version": 0},
        {"op": "pull", "parts": [[0, NUM_ROWS + 1]], "version": 0},
        {"op": "pull", "parts": [[0, -1]], "version": 0},
        {"op": "push", "parts": [[0, 0]], "rank": 9, "step": 0, "options": [{}]},
        {"op": "push"},
    ],
    ids=str,
)
def test_what_is_no_request_ends_its_connection_and_no_other(asked: dict[str, object]) -> None:
    shards = [shard_of(rank) for rank in range(RANKS)]
    with cluster(shards) as (clients, tables), servers(shards) as opened:
        with socket.create_connection(("127.0.0.1", opened[0].port), timeout=5) as stranger:
            wire.prove(stranger, SECRET, ROLES, is_server=False)
            wire.send(stranger, asked)
            assert stranger.recv(1) == b""
        assert torch.equal(pulled(clients[1], tables[1], torch.arange(NUM_ROWS), version=0), WHOLE)
