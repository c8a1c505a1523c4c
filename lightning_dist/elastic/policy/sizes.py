"""Which hosts and ranks a layout fits, and which of those that are there make the largest round that fits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dist.config.checks import check_count
from lightning_dist.config.parallel import ParallelConfig

_LISTED = 3  # numbers of hosts that are named as examples


@dataclass(frozen=True)
class Sizes:
    """What a layout asks of the ranks of a round.

    Attributes:
        multiple: The number of all ranks is a multiple of it.
        multiple_in_host: So is the number of each host's ranks of this.
        alike: All hosts have as many ranks.
        asked: The options that ask for it, for people.
    """

    multiple: int = 1
    multiple_in_host: int = 1
    alike: bool = False
    asked: str = ""

    def __post_init__(self) -> None:
        check_count("multiple", self.multiple, low=1, unit="ranks")
        check_count("multiple_in_host", self.multiple_in_host, low=1, unit="ranks")

    def fit(self, ranks: Sequence[int]) -> bool:
        """Whether hosts of so many ranks make a round."""
        return (
            bool(ranks)
            and sum(ranks) % self.multiple == 0
            and all(number % self.multiple_in_host == 0 for number in ranks)
            and not (self.alike and len(set(ranks)) > 1)
        )

    def seat(self, ranks: Mapping[str, int], most: int) -> tuple[str, ...]:
        """The hosts that make the largest round that fits, in their order; none if there is no such round.

        Args:
            ranks: Of each host, those first that are rather taken.
            most: No more hosts than that.
        """
        usable = {host: number for host, number in ranks.items() if number % self.multiple_in_host == 0}
        kinds = dict.fromkeys(usable.values()) if self.alike else (None,)
        choices = [
            self._largest({host: number for host, number in usable.items() if kind in (None, number)}, most)
            for kind in kinds
        ]
        return max(choices, key=lambda hosts: sum(ranks[host] for host in hosts), default=())

    def _largest(self, ranks: Mapping[str, int], most: int) -> tuple[str, ...]:
        """Of the first ones, all but the fewest ranks that are too many for a multiple."""
        pool = tuple(ranks)[:most]
        fewest: dict[int, tuple[int, frozenset[str]]] = {0: (0, frozenset())}  # by what is left over: ranks, and whose
        for host in reversed(pool):
            for left_over, (number, hosts) in list(fewest.items()):
                more, key = number + ranks[host], (left_over + ranks[host]) % self.multiple
                if key not in fewest or more < fewest[key][0]:
                    fewest[key] = (more, hosts | {host})
        _, dropped = fewest.get(sum(ranks[host] for host in pool) % self.multiple, (0, frozenset(pool)))
        return tuple(host for host in pool if host not in dropped)

    def explain(self, ranks: Mapping[str, int], most: int) -> str:
        """Why these hosts make no round, and which would, for people.

        Args:
            ranks: Of each host that is there.
            most: No more hosts than that.
        """
        there = ", ".join(f"{host}: {number}" for host, number in ranks.items()) or "none"
        return (
            f"{self.asked} does not fit the ranks that are there ({there}); {self._rule}{self._examples(ranks, most)}"
        )

    @property
    def _rule(self) -> str:
        rules = []
        if self.multiple > 1:
            rules.append(f"ranks in all must be a multiple of {self.multiple}")
        if self.multiple_in_host > 1:
            rules.append(f"those of each host a multiple of {self.multiple_in_host}")
        if self.alike:
            rules.append("all hosts must have as many ranks")
        return ", ".join(rules)

    def _examples(self, ranks: Mapping[str, int], most: int) -> str:
        said = []
        for number in dict.fromkeys(ranks.values()):
            counts = [count for count in range(1, max(most, self.multiple) + 1) if self.fit([number] * count)]
            fitting = ([count for count in counts if count <= most] or counts)[:_LISTED]
            if fitting:
                said.append(f"{' or '.join(map(str, fitting))} host{'s' if fitting != [1] else ''} of {_ranks(number)}")
        return f", so {'; '.join(said)} would fit" if said else ""


def sizes_of(parallel: ParallelConfig) -> Sizes:
    """What the parallel options ask of a round, so far as the options alone say it."""
    stages, sharers = parallel.pipeline.size or 1, parallel.tensor.size or 1
    whole_hosts = parallel.mode == "tensor" and parallel.tensor.size is None
    asked = {
        f"parallel.pipeline.size={stages}": stages > 1,
        f"parallel.tensor.size={sharers}": sharers > 1,
        f"parallel={parallel.mode}": parallel.mode == "hsdp" or whole_hosts,
        "parallel.secondary_shard=host": parallel.secondary_shard == "host",
    }
    return Sizes(
        multiple=stages * sharers,
        multiple_in_host=sharers,
        alike=parallel.mode == "hsdp" or whole_hosts or parallel.secondary_shard == "host",
        asked=" with ".join(option for option, is_set in asked.items() if is_set),
    )


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
