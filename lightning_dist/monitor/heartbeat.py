"""A heartbeat through the store of the rendezvous: it finds ranks that stand still, and does nothing about it.

Each rank has a thread that adds to a counter of its own, over a connection of its own. Rank 0 looks at all the others,
and rank 1 at rank 0. No collective, no call on the connection that training uses; a store that is gone ends the
heartbeat, and nothing else.

Note: a store that stands still.
    Where the process that holds the store is stopped, no call comes back, whatever its timeout. The thread then hangs
    until that process goes on or dies; ``close`` does not wait for it, and it is a daemon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from lightning_dist.monitor.beats import LEFT, BeatWatch, Silence
from lightning_dist.monitor.record import Span
from lightning_dist.monitor.sampling.source import Reading

LANE = "heartbeat"
"""The lane of spans in which a rank was silent."""

_METRIC = "heartbeat_timeouts"
_SHOWN = 8  # ranks named in one sentence


class Heartbeat:
    """Beats for this rank, and looks at those that it is to look at. Every rank opens one, in the same order of runs.

    As a source it gives the number of timeouts seen so far; of all ranks together it is the sum.

    Args:
        store: The store of the default process group; a connection of its own is made from it.
        rank: This rank.
        world_size: Number of ranks.
        host: This rank's host, which the others name when it is late.
        every_s: How often to beat and to look, in seconds.
        timeout_s: From when on a rank is late, in seconds.
        say: Takes a sentence for the user.
        silent: Takes the span in which a rank was silent, once it is back, or at the end.
        steps: How many steps there were by now.
        also: Timeouts that somebody else has counted, which this rank is to tell; ``None``: another rank does.
    """

    metrics = (_METRIC,)
    is_fine = False

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        host: str,
        every_s: float,
        timeout_s: float,
        say: Callable[[str], None],
        silent: Callable[[Span], None],
        steps: Callable[[], int],
        also: Callable[[], int] | None = None,
    ) -> None:
        self.timeouts = 0
        self._also = also
        self._default = store
        self._rank = rank
        self._host = host
        self._every_s = every_s
        self._watched = watched_by(rank, world_size)
        self._watch = BeatWatch(timeout_s)
        self._begun: set[int] = set()
        self._since_ns: dict[int, int] = {}  # rank that is late -> when it fell silent
        self._hosts: dict[int, str] = {}
        self._named: set[int] = set()  # as late; each once
        self._returned: set[int] = set()
        self._say, self._silent, self._steps = say, silent, steps
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hierdist-monitor-heartbeat", daemon=True)
        self._thread.start()

    def read(self, now_ns: int) -> list[Reading]:
        """Timeouts so far; nothing on ranks that look at nobody, and tell nobody's."""
        if not self._watched and self._also is None:
            return []
        return [Reading(_METRIC, self.timeouts + (self._also() if self._also is not None else 0))]

    def close(self, *, wait_s: float = 2.0) -> None:
        """Say goodbye and end the thread. Safe to call twice."""
        self._ending.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            store = self._connected()
            store.set(f"host/{self._rank}", self._host)
            while True:
                store.add(_key(self._rank), 1)
                self._look(store)
                if self._ending.wait(self._every_s):
                    break
            store.add(_key(self._rank), LEFT)
        except Exception as error:
            if not self._ending.is_set():  # else the store's process has ended its training, too
                self._say(f"the heartbeat has ended, training goes on: {type(error).__name__}: {error}")
        finally:
            now_ns = time.monotonic_ns()
            for rank, since_ns in self._since_ns.items():
                self._silent(self._span(rank, since_ns, now_ns))

    def _connected(self) -> dist.Store:
        """Keys that no other fit of this process group has, over a connection of this thread."""
        store: dist.Store = self._default.clone()  # type: ignore[attr-defined]  # missing in torch's stub
        del self._default
        generation = store.add(f"hierdist/heartbeat/generation/{self._rank}", 1)
        return dist.PrefixStore(f"hierdist/heartbeat/{generation}/", store)

    def _look(self, store: dist.Store) -> None:
        if not self._watched:
            return
        self._begun |= {rank for rank in self._watched if rank not in self._begun and store.check([_key(rank)])}
        changes = self._watch.look(_counts(store, sorted(self._begun)), time.monotonic())
        now_ns = time.monotonic_ns()
        for change in changes:
            if change.rank not in self._hosts and store.check([f"host/{change.rank}"]):
                self._hosts[change.rank] = store.get(f"host/{change.rank}").decode(errors="replace")
            if change.is_over:
                self._silent(self._span(change.rank, self._since_ns.pop(change.rank), now_ns))
            else:
                self.timeouts += 1
                self._since_ns[change.rank] = now_ns - round(change.silent_s * 1e9)
        for text in self._sentences(changes):
            self._say(text)

    def _sentences(self, changes: Sequence[Silence]) -> Iterator[str]:
        """About each rank that is late for the first time, and about its first return."""
        late = [change for change in changes if not change.is_over and change.rank not in self._named]
        if late:
            silent_s = max(change.silent_s for change in late)
            yield (
                f"no heartbeat from {self._names(late)} for {silent_s:.1f} s: stopped, swapped out, or cut off from "
                "the store; training goes on"
            )
        back = [change for change in changes if change.is_over and change.rank not in self._returned]
        if back:
            yield f"heartbeats again from {self._names(back)}, after {max(each.silent_s for each in back):.1f} s"
        self._named |= {change.rank for change in late}
        self._returned |= {change.rank for change in back}

    def _names(self, changes: Sequence[Silence]) -> str:
        shown = [self._name(change.rank) for change in changes[:_SHOWN]]
        more = len(changes) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")

    def _name(self, rank: int) -> str:
        return f"rank {rank} (host {self._hosts.get(rank, 'unknown')})"

    def _span(self, rank: int, start_ns: int, end_ns: int) -> Span:
        return Span(self._steps(), LANE, self._name(rank), start_ns, end_ns)


def watched_by(rank: int, world_size: int) -> tuple[int, ...]:
    """Whom a rank looks at: the first at all others, and the second at the first."""
    if rank == 0:
        return tuple(range(1, world_size))
    return (0,) if rank == 1 else ()


def _key(rank: int) -> str:
    return f"beats/{rank}"


def _counts(store: dist.Store, ranks: Sequence[int]) -> dict[int, int]:
    """One question for all where the store can be asked so."""
    keys = [_key(rank) for rank in ranks]
    if not keys:
        return {}
    has_questions_of_many = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stub
    values = store.multi_get(keys) if has_questions_of_many else [store.get(key) for key in keys]
    return {rank: int(value) for rank, value in zip(ranks, values, strict=True)}
