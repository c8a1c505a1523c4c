"""Opens what a server process is told to hold, restored from the other copies where it is started again."""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence

import torch

from lightning_dist.gradsync.parameter_server.client import connected
from lightning_dist.gradsync.parameter_server.processes.answers import Answers, fetched
from lightning_dist.gradsync.parameter_server.processes.kept import KeptTable
from lightning_dist.gradsync.parameter_server.processes.task import Share, Task
from lightning_dist.gradsync.parameter_server.server import RowServer

_COPY_S = 30.0


def serve(task: Task) -> Sequence[RowServer]:
    """Hold and serve all shares of a task.

    Raises:
        PeerLostError: The other copy of a share is not there, so that there is none.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # rows are checked as they come; unsaid, torch warns of it
    kept = []
    for share in task.shares:
        tables = [
            KeptTable(rows, table, timeout_s=task.timeout_s)
            for rows, table in zip(share.rows, task.tables, strict=True)
        ]
        if task.restores:
            _restore(share, tables, task)
        kept.append(tables)
    servers = []
    for share, tables in zip(task.shares, kept, strict=True):
        answers = functools.partial(Answers, tables, task.tables, timeout_s=task.timeout_s)
        servers.append(
            RowServer(socket.socket(fileno=share.listener), secret=task.secret, answers=answers, ended=Answers.end)
        )
    return servers


def _restore(share: Share, tables: Sequence[KeptTable], task: Task) -> None:
    assert share.elsewhere is not None, "else the process is not started again"
    # A copy that lives answers at once. One that does not is being restored itself, maybe from this one.
    with connected(share.elsewhere, task.secret, min(task.timeout_s, _COPY_S)) as connection:
        connection.settimeout(task.timeout_s)
        for number, table in enumerate(tables):
            table.restore(fetched(connection, number, table.own))
