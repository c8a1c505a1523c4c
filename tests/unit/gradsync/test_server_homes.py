"""Where server processes hold which ranks' rows, what they are told, and what they do not take from anybody."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist import wire
from lightning_dist.config import ParameterServerConfig
from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.parameter_server.client import connected
from lightning_dist.gradsync.parameter_server.processes import optimizers
from lightning_dist.gradsync.parameter_server.processes.answers import Answers, fetched
from lightning_dist.gradsync.parameter_server.processes.homes import homes_of
from lightning_dist.gradsync.parameter_server.processes.kept import KeptTable, Stepper
from lightning_dist.gradsync.parameter_server.processes.task import Share, Task
from lightning_dist.gradsync.parameter_server.server import RowServer, listening, send_bytes
from lightning_dist.gradsync.sparse.rows import Rows, Table, to_bytes

SECRET = b"s" * 32
TABLE = Table((20, 2), torch.float32)
ROWS = 8
DEADLINE_S = 10.0


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab", "ab", "aaaa", "abcabc"])
@pytest.mark.parametrize("per_host", [1, 2, 5])
@pytest.mark.parametrize("copies", [1, 2])
def test_each_rank_has_its_rows_on_its_host_and_a_copy_elsewhere(hosts: str, per_host: int, copies: int) -> None:
    if copies == 2 and len(set(hosts)) == per_host == 1:
        with pytest.raises(CombinationError, match="servers_per_host=2"):
            homes_of(hosts, per_host=per_host, copies=copies)
        return
    homes = homes_of(hosts, per_host=per_host, copies=copies)
    assert [each[0].host for each in homes] == list(hosts)
    for each in homes:
        assert len(set(each)) == copies
        assert copies == 1 or len(set(hosts)) == 1 or each[0].host != each[1].host
    for host in set(hosts):
        held = Counter(each[0] for each in homes if each[0].host == host)
        assert len(held) == min(per_host, hosts.count(host))
        assert max(held.values()) - min(held.values()) <= 1


def test_a_task_is_one_line_and_its_secret_is_not_printed() -> None:
    shares = (Share(1, (8, 3), 5, ("10.0.0.1", 77)), Share(0, (9, 4), 6))
    task = Task((TABLE, Table((3, 4, 5), torch.bfloat16)), shares, SECRET, 7.5, restores=True)
    line = task.to_json()
    assert "\n" not in line
    assert Task.from_json(line) == task
    assert SECRET.hex() not in repr(task)
    assert repr(SECRET) not in repr(task)


@contextlib.contextmanager
def serving() -> Iterator[tuple[KeptTable, socket.socket]]:
    kept = KeptTable(ROWS, TABLE, timeout_s=DEADLINE_S)
    server = RowServer(
        listening("127.0.0.1"),
        secret=SECRET,
        answers=lambda: Answers([kept], [TABLE], timeout_s=DEADLINE_S),
        ended=Answers.end,
    )
    try:
        with connected(("127.0.0.1", server.port), SECRET, DEADLINE_S) as connection:
            yield kept, connection
    finally:
        server.close()


def step(rows: Rows, *, version: int, count: int | None = None, optimizer: str = "SGD") -> tuple[dict[str, Any], Any]:
    header = {"op": "step", "table": 0, "version": version, "rows": rows.count if count is None else count}
    return {**header, "optimizer": optimizer, "options": {"lr": 1.0}}, to_bytes(rows, TABLE)


def some(*places: int) -> Rows:
    return Rows(torch.tensor(places), torch.ones(len(places), 2))


def test_a_step_that_is_said_twice_is_made_once_and_one_left_out_changes_nothing() -> None:
    with serving() as (kept, connection):
        for version, rows in ((1, some(0, 3)), (1, some(0, 3)), (3, some(3))):
            header, data = step(rows, version=version)
            wire.send(connection, header)
            send_bytes(connection, data)
            assert wire.receive(connection) == {"version": version}
        wire.send(connection, {"op": "step", "table": 0, "version": 4})
        assert wire.receive(connection) == {"version": 4}
        contents = fetched(connection, 0, kept.own)
        assert contents.version == 4
        assert contents.stepper == Stepper("SGD", {"lr": 1.0})
        assert contents.entries["values"][:, 0].tolist() == [-1, 0, 0, -2, 0, 0, 0, 0]
        assert torch.equal(kept.shard.look_up(torch.arange(ROWS), 4), contents.entries["values"])


@pytest.mark.parametrize(
    "asked",
    [
        step(some(3, 0), version=1),
        step(some(0, ROWS), version=1),
        step(some(0), version=1, count=1 << 40),
        step(some(0), version=1, count=-1),
        ({"op": "push", "parts": [], "rank": 0, "step": 0, "options": []}, None),
        ({"op": "read", "table": 1, "prefix": ""}, None),
        ({"op": "read", "table": -1, "prefix": ""}, None),
        ({"op": "write", "table": 0, "entries": [{"name": "values", "dtype": "object", "shape": [1]}]}, None),
        ({"op": "write", "table": 0, "entries": [{"name": "v", "dtype": "int64", "shape": [1 << 40]}]}, None),
        ({"op": "write", "table": 0, "entries": [{"name": "v", "value": 0}] * 65}, None),
        ({"op": "eval"}, None),
    ],
    ids=lambda asked: str(asked[0])[:60],
)
def test_what_is_no_request_is_not_done(asked: tuple[dict[str, Any], torch.Tensor | None]) -> None:
    with serving() as (kept, connection):
        wire.send(connection, asked[0])
        with contextlib.suppress(ConnectionError):
            if asked[1] is not None:
                send_bytes(connection, asked[1])
            assert connection.recv(1) == b""
        with kept.reading() as contents:
            assert contents.version == 0
            assert not contents.entries["values"].any()


@pytest.mark.parametrize("name", ["os.system", "Adam", "LBFGS"])
def test_an_optimizer_that_is_not_listed_is_not_made(name: str) -> None:
    with serving() as (_, connection):
        header, data = step(some(0), version=1, optimizer=name)
        wire.send(connection, header)
        send_bytes(connection, data)
        assert name in wire.receive(connection)["error"]


def test_the_users_optimizer_is_known_by_its_class_or_refused() -> None:
    class Mine(torch.optim.SGD):
        pass

    parameter = nn.Parameter(torch.zeros(2, 2))
    assert optimizers.name_of(torch.optim.SGD([parameter], lr=1)) == "SGD"
    with pytest.raises(CombinationError, match="Mine is none of them: write sync"):
        optimizers.name_of(Mine([parameter], lr=1))


def test_rows_that_may_be_old_are_refused() -> None:
    with pytest.raises(CombinationError, match="staleness=0"):
        ParameterServerConfig(servers="processes", staleness=4)
