"""The board: shared memory in which each rank of a host writes how far it is, and the agent what it wants of them.

It is the file ``board`` in the agent's folder. A cell has three parts, each with one writer: the rank's beat, the
rank's mark of what it waits for, and the agent's order. All times are of the host's monotonic clock, which its
processes share.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_dist.elastic.detect.phases import Order, Phase
from lightning_dist.elastic.detect.records import Record, slot_bytes
from lightning_dist.errors import LaunchError

AGENT_VARIABLE = "HIERDIST_AGENT"
"""Names the folder of this host's agent, in the environment of its ranks."""
FILE = "board"
_MAGIC = b"hierdist board 4"
_HEADER = struct.Struct("<16sI")
_HEADER_BYTES = 64
_TIMEOUTS = struct.Struct("<Q")
# pid, round, step, phase, since, at, beats, snapshot step, answered step, step's seconds, own seconds,
# started, joined, loaded, first step done, its number, whether it may stay
_BEAT = struct.Struct("<IIqIQQQqqddQQQQq?")
_WHAT_BYTES = 96
_MARK = struct.Struct(f"<QIQ{_WHAT_BYTES}s")  # operations begun, threads that wait, since, what
_WHY_BYTES = 240
_ORDER = struct.Struct(f"<II{_WHY_BYTES}s")  # what, of which round, why
_CELLS_AT = _HEADER_BYTES + 2 * slot_bytes(_TIMEOUTS)
_CELL_BYTES = 2 * (slot_bytes(_BEAT) + slot_bytes(_MARK) + slot_bytes(_ORDER))


@dataclass(frozen=True)
class Beat:
    """How far a rank is, as it last said. Times are of the host's monotonic clock; 0: it has not come so far.

    Attributes:
        pid: Its process.
        round: Which round it is in, from 1.
        step: The optimizer steps that are done in all; -1: none known yet.
        phase: What it is about.
        since_ns: When the phase began.
        at_ns: When it said so.
        beats: How often it has said something; it only grows while the process lives.
        snapshot_step: The newest step whose snapshot is committed; -1: none.
        answered_step: The step at which it has done what it was asked to; -1: not yet.
        step_s: How long its last step took, in seconds; ``nan``: unknown.
        own_s: How much of that it waited for no other rank; ``nan``: unknown.
        started_ns: When the process began.
        joined_ns: When it had met the other ranks.
        loaded_ns: When model, data and snapshot were there.
        first_step_ns: When its first step was done.
        first_step: Its number among all optimizer steps; -1: it has done none.
        may_stay: Whether its process means to stay for the next round, should another rank fail.
    """

    pid: int
    round: int
    step: int = -1
    phase: Phase = Phase.STARTING
    since_ns: int = 0
    at_ns: int = 0
    beats: int = 0
    snapshot_step: int = -1
    answered_step: int = -1
    step_s: float = math.nan
    own_s: float = math.nan
    started_ns: int = 0
    joined_ns: int = 0
    loaded_ns: int = 0
    first_step_ns: int = 0
    first_step: int = -1
    may_stay: bool = False


@dataclass(frozen=True)
class Mark:
    """What a rank waits for.

    Attributes:
        begun: How many operations between ranks it has begun.
        waits: How many of its threads wait in one.
        since_ns: When the newest began, or ended.
        what: The newest, in words.
    """

    begun: int = 0
    waits: int = 0
    since_ns: int = 0
    what: str = ""


class Cell:
    """One rank's part of the board. The rank writes and answers, the agent orders, and both read.

    Args:
        memory: The board's.
        offset: Where the cell begins.
        clock_ns: The host's monotonic clock.
    """

    def __init__(self, memory: mmap.mmap, offset: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._beat_record = Record(memory, offset, _BEAT)
        offset += 2 * slot_bytes(_BEAT)
        self._mark_record = Record(memory, offset, _MARK)
        offset += 2 * slot_bytes(_MARK)
        self._order_record = Record(memory, offset, _ORDER)
        self._clock_ns = clock_ns
        self._lock = threading.RLock()  # a signal's handler may write where the main thread was writing
        self._mark_lock = threading.RLock()
        self._beat: Beat | None = None
        self._last_read: Beat | None = None
        self._last_mark = Mark()

    # -- the rank's side ----------------------------------------------------------------------------------------------

    def begin(self, *, round: int, pid: int | None = None) -> None:  # noqa: A002  # the field's word
        """A rank begins here; whatever was written before is of another one."""
        now_ns = self._clock_ns()
        with self._lock:
            self._beat = Beat(
                pid=os.getpid() if pid is None else pid, round=round, since_ns=now_ns, started_ns=now_ns, at_ns=now_ns
            )
            self._put(self._beat)

    def resume(self, *, round: int) -> None:  # noqa: A002  # the field's word
        """Go on where this process wrote before in this round, if it did; else begin."""
        with self._lock:
            beat = self.read()
            if beat is not None and (beat.pid, beat.round) == (os.getpid(), round):
                self._beat = beat
            else:
                self.begin(round=round)

    def write(
        self,
        *,
        phase: Phase | None = None,
        step: int | None = None,
        snapshot_step: int | None = None,
        step_s: float | None = None,
        own_s: float | None = None,
    ) -> None:
        """Say how far this rank is; what is not given stays. Each call is a sign of progress.

        Args:
            phase: What it is about from now on.
            step: Optimizer steps done in all.
            snapshot_step: The newest step whose snapshot is committed.
            step_s: Seconds of the last step.
            own_s: Seconds of it without a wait for others.
        """
        with self._lock:
            beat, now_ns = self._own(), self._clock_ns()
            changes: dict[str, int | float] = {"at_ns": now_ns, "beats": beat.beats + 1}
            given = {"step": step, "snapshot_step": snapshot_step, "step_s": step_s, "own_s": own_s}
            changes |= {name: value for name, value in given.items() if value is not None}
            if phase is not None and phase != beat.phase:
                reached = _reached(beat, phase, now_ns)
                if "first_step_ns" in reached:  # a batch is done, which need not be a step if gradients are accumulated
                    reached["first_step"] = beat.step + 1 if beat.step >= 0 or step is None else step
                changes |= {"phase": phase, "since_ns": now_ns} | reached
            self._beat = replace(beat, **changes)  # type: ignore[arg-type]  # as the fields are
            self._put(self._beat)

    def answer(self, step: int) -> None:
        """Say that what was ordered is done.

        Args:
            step: At which.
        """
        with self._lock:
            self._beat = replace(self._own(), answered_step=step)
            self._put(self._beat)

    def offer_to_stay(self) -> None:
        """Say that this process means to stay for the next round, should another rank fail."""
        with self._lock:
            self._beat = replace(self._own(), may_stay=True)
            self._put(self._beat)

    def commit(self, step: int) -> None:
        """Say that the snapshot of a step is committed; from any thread, so no sign of training's progress.

        Args:
            step: Which.
        """
        with self._lock:
            self._beat = replace(self._own(), snapshot_step=step)
            self._put(self._beat)

    def mark(self, *, begun: int, waits: int, what: str) -> None:
        """Say what this rank waits for.

        Args:
            begun: Operations between ranks that it has begun.
            waits: Its threads that wait in one.
            what: The newest of them; cut to 96 bytes.
        """
        with self._mark_lock:
            self._mark_record.write(begun, waits, self._clock_ns(), what.encode()[:_WHAT_BYTES])

    def ordered(self) -> tuple[Order, int]:
        """What the agent wants, and in which round."""
        found = self._order_record.read()
        return (Order.NONE, 0) if found is None else (Order(found[0]), found[1])

    def ordered_why(self) -> str:
        """Why the agent wants it, in words; may be empty."""
        found = self._order_record.read()
        return "" if found is None else _text(found[2])

    # -- the agent's side ---------------------------------------------------------------------------------------------

    def order(self, order: Order, round: int, why: str = "") -> None:  # noqa: A002  # the field's word
        """Ask something of the rank.

        Args:
            order: What.
            round: Only a rank of this round is meant.
            why: In words, for the rank's error; cut to 240 bytes.
        """
        self._order_record.write(order, round, why.encode()[:_WHY_BYTES])

    def read(self) -> Beat | None:
        """What the rank has said last; ``None``: nothing yet."""
        found = self._beat_record.read()
        if found is not None:
            pid, round_, step, phase, *rest = found
            self._last_read = Beat(pid, round_, step, Phase(phase), *rest)
        return self._last_read

    def read_mark(self) -> Mark:
        """What the rank waits for, as far as it says."""
        found = self._mark_record.read()
        if found is not None:
            begun, waits, since_ns, what = found
            self._last_mark = Mark(begun, waits, since_ns, _text(what))
        return self._last_mark

    # -- both ---------------------------------------------------------------------------------------------------------

    def _own(self) -> Beat:
        if self._beat is None:
            raise LaunchError("this rank writes into its cell of the board before begin() was called")
        return self._beat

    def _put(self, beat: Beat) -> None:
        self._beat_record.write(
            beat.pid,
            beat.round,
            beat.step,
            beat.phase,
            beat.since_ns,
            beat.at_ns,
            beat.beats,
            beat.snapshot_step,
            beat.answered_step,
            beat.step_s,
            beat.own_s,
            beat.started_ns,
            beat.joined_ns,
            beat.loaded_ns,
            beat.first_step_ns,
            beat.first_step,
            beat.may_stay,
        )


class Board:
    """The cells of a host's ranks; made by :meth:`create` or :meth:`open`."""

    def __init__(self, path: Path, memory: mmap.mmap, num_cells: int) -> None:
        self.path = path
        self.num_cells = num_cells
        self._memory = memory
        self._timeouts = Record(memory, _HEADER_BYTES, _TIMEOUTS)
        self._cells = [Cell(memory, _CELLS_AT + index * _CELL_BYTES) for index in range(num_cells)]

    @classmethod
    def create(cls, path: Path, num_cells: int) -> Board:
        """Make an empty one. A rank that still has an earlier one open goes on writing into that, unseen.

        Args:
            path: Its file, which only this user may read.
            num_cells: One for each local rank.
        """
        size = _CELLS_AT + num_cells * _CELL_BYTES
        fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, num_cells), 0)
            memory = mmap.mmap(descriptor, size)
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return cls(path, memory, num_cells)

    @classmethod
    def open(cls, path: Path) -> Board:
        """The one that an agent has made.

        Raises:
            LaunchError: There is none, or it is of another version.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LaunchError(
                f"the agent's board {path} cannot be opened ({error.strerror}); {AGENT_VARIABLE} is set by "
                "'hierdist launch' for the ranks that it starts: unset it for other processes"
            ) from error
        try:
            size = os.fstat(descriptor).st_size
            header = os.pread(descriptor, _HEADER.size, 0)
            magic, num_cells = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0)
            if magic != _MAGIC or size != _CELLS_AT + num_cells * _CELL_BYTES:
                raise LaunchError(
                    f"{path} is no board of this version of lightning_dist: agent and ranks must use the same one"
                )
            return cls(path, mmap.mmap(descriptor, size), num_cells)
        finally:
            os.close(descriptor)

    def cell(self, local_rank: int) -> Cell:
        """A rank's.

        Raises:
            LaunchError: The agent runs fewer ranks.
        """
        if not 0 <= local_rank < self.num_cells:
            raise LaunchError(
                f"local rank {local_rank} has no cell on the agent's board, which is for {self.num_cells}"
            )
        return self._cells[local_rank]

    @property
    def timeouts(self) -> int:
        """How many hangs of this host's ranks the agent has found since it began; ranks count them in their record."""
        found = self._timeouts.read()
        return 0 if found is None else int(found[0])

    def count_timeouts(self, found: int) -> None:
        """Add to :attr:`timeouts`; only the agent does."""
        self._timeouts.write(self.timeouts + found)

    def close(self) -> None:
        """Let go of the memory; its cells cannot be used any more. Safe to call twice."""
        self._memory.close()


def _text(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode(errors="replace")


def _reached(beat: Beat, phase: Phase, now_ns: int) -> dict[str, int]:
    """Which times of a start are known once a phase begins; each is set once."""
    reached: dict[str, int] = {}
    if phase >= Phase.LOADING and not beat.joined_ns:
        reached["joined_ns"] = now_ns
    if phase >= Phase.FIRST_STEP and not beat.loaded_ns:
        reached["loaded_ns"] = now_ns
    if phase == Phase.TRAINING and not beat.first_step_ns:
        reached["first_step_ns"] = now_ns
    return reached
