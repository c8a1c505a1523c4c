"""Who is missing: ranks leave word of a failure in the store, and who neither does nor answers is the suspect.

When a rank dies, its neighbours in a collective see an error at once and, by ending, make their own neighbours fail.
Each of them knows only that "a peer" is gone. So a rank that fails leaves word of what it saw and rings for the others.
A thread of each rank, the witness, hears the bell and answers what its rank is doing, also while that waits in a
collective or computes. Who answers nothing is dead, stopped or cut off; who answers that it waits for nobody is who the
others wait for; and a rank that ended by an error of its own says so.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lightning_dist.comm.bounded import Bounded, own_connection

_FOREVER = timedelta(days=365)
_POLL_S = 0.05
_LONGEST = 500  # characters of a statement
_THREAD = "hierdist-testimony"
_PACKAGE = os.path.dirname(os.path.dirname(__file__))

Listener = Callable[[int, int, str], None]
"""Takes how many operations a rank has begun, how many of its threads wait in one, and the newest in words."""


class Activity:
    """What a rank waits for, what it last did, and whether it is to wait no longer; the seam keeps it.

    The witness tells it to the other ranks, and who listens (see :meth:`tell`) to the agent of this host.
    """

    def __init__(self) -> None:
        self._waits: dict[int, str] = {}  # by thread
        self._last: tuple[str, float] | None = None
        self._main = threading.get_ident()
        self._lock = threading.RLock()  # a signal's handler may wait for others, too
        self._begun = 0
        self._waited_s = 0.0
        self._waits_since_s = 0.0
        self._listener: Listener | None = None
        self._released: str | None = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark that this thread waits for other ranks inside the body."""
        thread = threading.get_ident()
        with self._lock:
            if not self._waits:
                self._waits_since_s = time.monotonic()
            self._waits[thread] = what
            self._begun += 1
            self._say(what)
        try:
            yield
        finally:
            with self._lock:
                now_s = time.monotonic()
                if self._waits.pop(thread, None) is not None and not self._waits:
                    self._waited_s += now_s - self._waits_since_s
                self._last = (what, now_s)
                self._say(what)

    @property
    def waited_s(self) -> float:
        """For how long any of its threads has waited for other ranks so far, in seconds."""
        with self._lock:
            return self._waited_s + (time.monotonic() - self._waits_since_s if self._waits else 0.0)

    @property
    def released(self) -> str | None:
        """Why this rank is to wait for no other any more; ``None``: it may."""
        return self._released

    def tell(self, listener: Listener | None) -> None:
        """Call with each change from now on, in the thread that begins or ends to wait."""
        self._listener = listener

    def release(self, why: str) -> None:
        """Let waits that look up end with an error that says why; the backend's own must be ended apart."""
        self._released = why

    def describe(self) -> tuple[bool, str]:
        """Whether it waits for other ranks, and in words what it does."""
        waits = list(self._waits.values())
        if waits:
            return True, "waits in " + ", ".join(dict.fromkeys(waits))
        last = self._last
        since = f"; its last operation, {last[0]}, ended {time.monotonic() - last[1]:.1f} s ago" if last else ""
        return False, f"is at {position_of(self._main)}, in no operation between ranks{since}"

    def _say(self, what: str) -> None:
        if self._listener is not None:
            self._listener(self._begun, len(self._waits), what)


class Testimony:
    """Statements of ranks about a failure, kept in a store.

    The store is used by one thread at a time of this process; the witness has a connection of its own.

    Args:
        store: Shared by all ranks; its keys are prefixed by the caller.
        rank: This process's global rank.
        world_size: Number of ranks.
        activity: What this rank is doing.
        holder: The rank whose process holds the store; ``None`` if another process, or a file, does.
        grace_s: How long to wait for the others' answers, in seconds.

    Raises:
        CollectiveTimeoutError: The store does not answer.
        torch.distributed.DistError: The store is gone.
    """

    __test__ = False  # not a test class, whatever its name begins with

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        activity: Activity | None = None,
        holder: int | None = None,
        grace_s: float = 3.0,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._holder = holder
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._statement: str | None = None
        self._is_own_fault = False
        self._posted: bool | None = None  # whether the store took it
        self._verdict: str | None = None
        self._activity = activity or Activity()
        self._heard = _Heard()
        self._witness = threading.Thread(
            target=_witness,
            args=(own_connection(store, 2 * grace_s), rank, self._activity, self._heard),
            name="hierdist-witness",
            daemon=True,
        )
        self._witness.start()
        self._unreachable = threading.Event()  # whoever waits for the store now, waits until its server ends
        self._dismiss = weakref.finalize(self, _dismiss, store, rank, self._witness, self._unreachable, grace_s)
        self._dismiss.atexit = False  # a daemon thread needs no farewell at exit

    def post(self, statement: str, *, own_fault: bool = False) -> None:
        """Leave word, once; later calls change nothing. Gives up silently when the store is gone.

        Args:
            statement: What this rank saw.
            own_fault: Whether the failure began here (an exception of the user's code), not at a peer.
        """
        with self._lock:
            self._post(statement, own_fault)

    def verdict(self, statement: str, where: Callable[[int], str]) -> str:
        """Post, wait for the others, and say who began it. Later calls give the first one's answer.

        Args:
            statement: What this rank saw.
            where: Turns a rank into words.
        """
        with self._lock:
            if self._verdict is None and self._activity.released is None:
                self._verdict = self._judge(statement, where)
            # Whoever has released this rank knows who began it, and will not wait.
            return self._activity.released or self._verdict or ""

    @property
    def statement(self) -> str | None:
        """The word this rank has left, if any."""
        return self._statement

    def alarm(self, waited_s: float) -> str | None:
        """Why who has waited for ``waited_s`` seconds should give up, or ``None``. Cheap, needs no store.

        A lost store alone is no reason at first: the ranks may well reach each other, or be at their end.
        """
        if self._heard.bell:
            return "another rank reports a failure"
        if self._heard.store_lost and waited_s > 2 * self._grace_s:
            return "the store of the rendezvous is gone"
        return None

    def close(self) -> None:
        """End the witness. Safe to call twice."""
        self._dismiss()

    def _post(self, statement: str, own_fault: bool) -> bool:
        if self._posted is None:
            self._statement, self._is_own_fault = statement, own_fault
            value = json.dumps({"statement": statement[:_LONGEST], "own_fault": own_fault})

            def leave_word_and_ring() -> None:
                self._store.set(_failed(self._rank), value)
                if self._store.add("rung", 1) == 1:
                    for rank in range(self._world_size):
                        self._store.set(_bell(rank), "ring")

            self._posted = Bounded(leave_word_and_ring, name=_THREAD).succeeds(self._grace_s)
            if not self._posted:
                self._unreachable.set()
        return self._posted

    def _judge(self, statement: str, where: Callable[[int], str]) -> str:
        heard: dict[int, dict[str, object]] = {}
        found: list[str] = []

        def collect_and_agree() -> None:
            self._collect(heard)
            if self._activity.released is not None:  # the others have not had their time to answer
                return
            found.append(self._store.compare_set("verdict", "", self._conclude(heard, where)).decode())

        reached = self._post(statement, own_fault=False)
        if not (reached and Bounded(collect_and_agree, name=_THREAD).succeeds(2 * self._grace_s)):
            return self._without_store(where)
        return found[0] if found else ""

    def _conclude(self, heard: Mapping[int, Mapping[str, object]], where: Callable[[int], str]) -> str:
        # Another thread of the rank that began it may be the first to ask, and hears all but its own rank.
        own = {self._rank: {"statement": (self._statement or "")[:_LONGEST], "own_fault": self._is_own_fault}}
        for rank, said in sorted({**heard, **own}.items()):
            if said.get("own_fault"):
                return f"{where(rank)} ended with an error of its own: {said['statement']}."
        silent = [rank for rank in range(self._world_size) if rank != self._rank and rank not in heard]
        if silent:
            names = ", ".join(where(rank) for rank in silent)
            return f"Lost: {names} (no answer within {self._grace_s:g} s: dead, stopped or cut off)."
        idle = [f"{where(rank)} {said['doing']}" for rank, said in sorted(heard.items()) if said.get("idle")]
        if idle:
            return f"Waited for: {'; '.join(idle)}."
        return "All ranks are alive and report the failure or wait."

    def _without_store(self, where: Callable[[int], str]) -> str:
        if self._holder is None:
            return "The store of the rendezvous does not answer: the launcher that holds it has ended or is cut off."
        holder = where(self._holder)
        return f"The store of the rendezvous does not answer: {holder}, which holds it, is dead, stopped or cut off."

    def _collect(self, heard: dict[int, dict[str, object]]) -> None:
        """Read what ranks say until all have spoken, or the time is up; a statement counts for more than an answer."""
        give_up = time.monotonic() + self._grace_s
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        while True:
            for rank in others:
                for key in (_failed(rank), _alive(rank)):
                    if "statement" not in heard.get(rank, {}) and self._store.check([key]):
                        heard[rank] = {**heard.get(rank, {}), **json.loads(self._store.get(key))}
            began = self._is_own_fault or any(said.get("own_fault") for said in heard.values())
            if began or self._activity.released is not None or self._store.check(["verdict"]):
                return
            for said in heard.values():
                said["idle"] = "statement" not in said and not said["waits"]
            if len(heard) == len(others) or time.monotonic() >= give_up:
                return
            time.sleep(_POLL_S)


class _Heard:
    """What the witness has learnt."""

    bell = False
    store_lost = False


def _witness(store: dist.Store, rank: int, activity: Activity, heard: _Heard) -> None:
    """Wait for the bell, then say what this rank does. The store's end, or the bell's other word, ends it."""
    try:
        store.wait([_bell(rank)], _FOREVER)
        if store.get(_bell(rank)) == b"ring":
            waits, doing = activity.describe()
            heard.bell = True
            store.set(_alive(rank), json.dumps({"waits": waits, "doing": doing}))
    except Exception:  # the store is gone with its server
        heard.store_lost = True


def _dismiss(
    store: dist.Store, rank: int, witness: threading.Thread, unreachable: threading.Event, timeout_s: float
) -> None:
    if witness.is_alive() and not unreachable.is_set():
        Bounded(lambda: store.set(_bell(rank), "dismissed"), name=_THREAD).succeeds(timeout_s)
        witness.join(timeout_s)


def position_of(thread: int) -> str:
    """File, line and function in which a thread is, seen from the user's code where that is on the stack."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "its end"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    return "site-packages" in file or file.startswith((os.path.dirname(threading.__file__), _PACKAGE, "<frozen"))


def _failed(rank: int) -> str:
    return f"failed/{rank}"


def _alive(rank: int) -> str:
    return f"alive/{rank}"


def _bell(rank: int) -> str:
    return f"bell/{rank}"
