"""What went wrong on which rank, as one error a test can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OUTPUT_TAIL_CHARS = 4000


@dataclass(frozen=True)
class RankFailure:
    """One rank's failure.

    Attributes:
        rank: Global rank.
        kind: ``raised``, ``died``, ``hung`` (no answer by the deadline) or ``leaked`` (left something behind).
        summary: One line.
        details: Traceback, or the stacks of all threads.
        output: The end of what the rank printed.
        exception: What was raised, if it could be pickled.
    """

    rank: int
    kind: str
    summary: str
    details: str = ""
    output: str = ""
    exception: BaseException | None = None


class RanksFailed(AssertionError):
    """Some ranks failed. The message has every one of them, the first to fail first.

    Attributes:
        failures: In order of time.
    """

    def __init__(self, what: str, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(failures)
        ranks = ", ".join(f"{f.rank} ({f.kind})" for f in failures)
        lines = [f"{what}: failed on rank {ranks}"]
        for failure in failures:
            lines.append(f"---- rank {failure.rank} {failure.kind}: {failure.summary}")
            if failure.details:
                lines.append(failure.details.rstrip())
            if failure.output.strip():
                lines.append(f"---- rank {failure.rank} printed:")
                lines.append(failure.output.rstrip()[-OUTPUT_TAIL_CHARS:])
        super().__init__("\n".join(lines))

    def of_rank(self, rank: int) -> RankFailure:
        """The failure of one rank.

        Raises:
            KeyError: That rank did not fail.
        """
        for failure in self.failures:
            if failure.rank == rank:
                return failure
        raise KeyError(f"rank {rank} did not fail; these did: {[f.rank for f in self.failures]}")
