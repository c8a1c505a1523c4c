"""How the ranks of one round are started on a host: each goes on in the process that it had, or is forked."""

from __future__ import annotations

import os

from lightning_dist.elastic.agent.environment import rank_environment, words_file
from lightning_dist.elastic.agent.host_parts import HostParts
from lightning_dist.elastic.agent.rank_group import RankGroup
from lightning_dist.elastic.agent.start import Start
from lightning_dist.elastic.agent.staying import is_same_place, send_on
from lightning_dist.elastic.rounds import Round


class RoundStarts:
    """Starts the ranks of a round.

    Args:
        parts: The agent's.
        round: Which one begins.
        master: Address and port of its store.
    """

    def __init__(self, parts: HostParts, round: Round, master: tuple[str, int]) -> None:  # noqa: A002  # the field's word
        self._parts = parts
        self._round = round
        self._environments = {
            local_rank: rank_environment(
                parts.environ,
                round=round,
                host=parts.host,
                local_rank=local_rank,
                master=master,
                folder=parts.folder.path,
                record=parts.record,
            )
            for local_rank in range(parts.num_ranks)
        }
        self._staying: dict[int, int] = {}
        self._untried: set[int] = set()  # processes that go on, and may yet fail to
        self.went_on = False
        """A rank goes on in the process that it had."""

    def keep(self, former: RankGroup, before: RoundStarts) -> None:
        """Take those processes of the last round over that have a place in this one; the others are ended.

        Args:
            former: The last round's ranks.
            before: How they were started.
        """
        former.collect()
        stay = {
            local_rank: pid
            for local_rank, pid in former.staying.items()
            if is_same_place(before._environments[local_rank], self._environments[local_rank])
        }
        former.dismiss(former.staying.keys() - stay.keys())
        self._staying = stay

    def start(self, local_rank: int) -> int:
        """Start a rank, in the process that it had or in a new one; its process id.

        Raises:
            TemplateLostError: There is nothing to fork it of.
        """
        pid = self._staying.pop(local_rank, None)
        if pid is None:
            return self.fork(local_rank)
        parts, rank = self._parts, self._rank(local_rank)
        parts.output.go_on(f"{parts.host}:{rank}", self._log(rank))
        send_on(parts.folder.path, local_rank, self._environments[local_rank])
        self._untried.add(local_rank)
        self.went_on = True
        parts.say(f"rank {rank} goes on in its process {pid}")
        return pid

    def gives_way(self, local_rank: int, ranks: RankGroup) -> bool:
        """Whether a rank that has failed is to be forked in this round: its script cannot run twice in a process.

        Args:
            local_rank: Which; it has ended.
            ranks: Of this round.
        """
        if local_rank not in self._untried:
            return False
        self._untried.discard(local_rank)
        return local_rank not in ranks.beats()  # it has met nobody yet, and the others wait

    def fork(self, local_rank: int) -> int:
        """Start a rank in a new process; its process id.

        Raises:
            TemplateLostError: There is nothing to fork it of.
        """
        parts, rank = self._parts, self._rank(local_rank)
        words_file(parts.folder.path, local_rank).unlink(missing_ok=True)
        start = Start(local_rank, parts.program, self._environments[local_rank], folder=os.getcwd())
        with parts.output.of_rank(f"{parts.host}:{rank}", self._log(rank)) as prints:
            if not parts.template.is_alive:
                parts.template.open()
            return parts.template.start(start, stdout=prints.stdout, stderr=prints.stderr)

    def _rank(self, local_rank: int) -> int:
        return self._round.first_rank(self._parts.host) + local_rank

    def _log(self, rank: int) -> str:
        return f"round-{self._round.number:04}/rank-{rank:05}.log"
