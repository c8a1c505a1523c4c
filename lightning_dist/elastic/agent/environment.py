"""The variables that a rank is started with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_dist.elastic.launched import AGENT_VARIABLE, ROUND_VARIABLE, RUN_VARIABLE
from lightning_dist.elastic.rounds import Round

HOST_VARIABLE = "HIERDIST_HOST"
RECORD_VARIABLE = "HIERDIST_RECORD"
_ROLE = "default"


def words_file(folder: Path, local_rank: int) -> Path:
    """Where a rank leaves its last words."""
    return folder / f"words.{local_rank}.json"


def template_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """That of the process of which ranks are forked.

    As torchrun does, ranks have one thread each for computing unless the user says otherwise: several on one machine
    would otherwise take its cores from each other. The number is read when torch is loaded, so that it stands here.
    """
    return {"OMP_NUM_THREADS": "1", **environ}


def rank_environment(
    environ: Mapping[str, str],
    *,
    round: Round,  # noqa: A002  # the field's word
    host: str,
    local_rank: int,
    master: tuple[str, int],
    folder: Path,
    record: Path | None = None,
) -> dict[str, str]:
    """All variables of a rank: the agent's own, what torchrun sets, and what this library's ranks look for.

    Args:
        environ: The agent's.
        round: Which one begins.
        host: This host's name in it.
        local_rank: Which rank of this host.
        master: Address and port of the ranks' store.
        folder: The agent's.
        record: Where incidents are written.
    """
    names = [seat.host for seat in round.seats]
    group_rank = names.index(host)
    local_size = round.seats[group_rank].num_ranks
    rank, world_size = round.first_rank(host) + local_rank, round.world_size
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": group_rank,
        "NODE_RANK": group_rank,
        "GROUP_WORLD_SIZE": len(names),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": _ROLE,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "TORCHELASTIC_RUN_ID": round.run,
        "TORCHELASTIC_RESTART_COUNT": round.number - 1,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the agent of the first host has opened it: no rank must win a port
        AGENT_VARIABLE: folder,
        RUN_VARIABLE: round.run,
        ROUND_VARIABLE: round.number,
        HOST_VARIABLE: host,
    }
    if record is not None:
        variables[RECORD_VARIABLE] = record
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # as torchrun sets it
    return {**defaults, **template_environment(environ), **{name: str(value) for name, value in variables.items()}}
