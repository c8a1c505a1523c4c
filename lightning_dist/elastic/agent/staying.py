"""A process that stays for the next round: what its agent and it agree upon.

When another rank fails, a rank's process need not end. It takes apart what its round has made, says ``WAITING`` on the
board, and waits for a file in the agent's folder with the variables of the next round: then it runs the user's script
once more. The agent counts it among the ranks of that round, in the place of one that it would have forked.

Note [whose place]
    A process stays only if it is the same rank among as many as before, on the same hosts: what libraries have read
    from their environment when they were imported is true then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from lightning_dist.elastic.agent_folder import read_json, write_json
from lightning_dist.elastic.launched import ROUND_VARIABLE

STAY_S = 5.0
"""How long a process has, once it was let go, to take apart what its round has made, in seconds; then it is killed."""
WAIT_S = 600.0
"""How long a process waits for its next round, in seconds; then it ends, and another one is forked."""
_OF_ROUND = frozenset({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", ROUND_VARIABLE})
_POLL_S = 0.01


def is_same_place(before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Whether a process of one round may be a rank of the next: nothing but the round is another.

    Args:
        before: The rank's variables.
        after: Those of the rank that would be forked.
    """
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return changed <= _OF_ROUND


def next_file(folder: Path, local_rank: int) -> Path:
    """Where a process that stays finds the variables of its next round.

    Args:
        folder: The agent's.
        local_rank: Whose.
    """
    return folder / f"next.{local_rank}.json"


def send_on(folder: Path, local_rank: int, environment: Mapping[str, str]) -> None:
    """Let the process that stays go on.

    Args:
        folder: The agent's.
        local_rank: Whose.
        environment: All its variables.
    """
    write_json(next_file(folder, local_rank), dict(environment))


def wait_for_next(folder: Path, local_rank: int, *, timeout_s: float = WAIT_S) -> dict[str, str] | None:
    """The variables of the next round, once the agent has written them; ``None``: it has not, in all that time.

    Args:
        folder: The agent's.
        local_rank: Whose.
        timeout_s: In seconds.
    """
    path, deadline_s = next_file(folder, local_rank), time.monotonic() + timeout_s
    while True:
        found = read_json(path)
        if found is not None:
            path.unlink(missing_ok=True)
            return {str(name): str(value) for name, value in found.items()}
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_POLL_S)
