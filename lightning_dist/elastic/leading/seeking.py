"""Finds the leader, and joins it: what an agent does that has none."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.elastic.leading import messages
from lightning_dist.elastic.leading.aside import aside
from lightning_dist.elastic.leading.channel import Channel, dial
from lightning_dist.elastic.leading.fence import Fence
from lightning_dist.elastic.leading.messages import Status
from lightning_dist.elastic.leading.remembered import Remembered
from lightning_dist.elastic.leading.roll_call import RollCall
from lightning_dist.elastic.leading.setup import Setup
from lightning_dist.elastic.leading.succession import Choice, Join, Lead, choose
from lightning_dist.elastic.session import End
from lightning_dist.errors import LaunchError
from lightning_dist.wire import WrongSecretError

_LOOKS = 10
_WORD_S = 30.0  # between two words to people
_LOOK_S = 2.0  # until the first look at whether the run is over


class NoLeaderError(Exception):
    """There is none in time, it does not take this host, or the run is over.

    Attributes:
        end: What the agent is to end with.
    """

    def __init__(self, reason: str, *, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.end = End(exit_code, reason)


class _RefusedError(ConnectionError):
    """Not yet."""


@dataclass(frozen=True)
class _Fenced:
    """Another host has the claim of the next round.

    Attributes:
        reason: For people.
        since_s: When this host has first met it.
        until_s: It does not lead before that.
    """

    reason: str
    since_s: float
    until_s: float


class Seeker:
    """See the module.

    Args:
        setup: Where leaders may be.
        remembered: What this host knows of the run.
        own_status: What this host's endpoint says of itself.
    """

    def __init__(self, setup: Setup, remembered: Remembered, own_status: Callable[[], Status]) -> None:
        self._setup = setup
        self._state = remembered
        self._own_status = own_status
        self._leader_index: int | None = None
        self._fenced: _Fenced | None = None
        self._suspect: int | None = None  # its connection was reset
        self._silent: int | None = None

    def lost_leader(self, *, is_reset: bool) -> None:
        """The connection to the leader has failed, and nothing says that its process is dead.

        Args:
            is_reset: It was reset: if nobody listens at the endpoint, the process is dead. Else the host is silent.
        """
        self._suspect, self._silent = (self._leader_index, None) if is_reset else (None, self._leader_index)

    def fence(self, reason: str) -> bool:
        """Another host has the claim of the next round; whether that is news.

        It leads, and is found, or it is gone. That it is gone shows when it calls as a new process, which needs
        somebody to call: so this host leads again after a while, and asks again.
        """
        now_s, before = time.monotonic(), self._fenced
        since_s = now_s if before is None else before.since_s
        self._fenced = _Fenced(reason, since_s, now_s + self._setup.pace.deadline_s)
        return before is None or before.reason != reason

    def unfence(self) -> None:
        """There is a leader that has the claim."""
        self._fenced = None

    def roll_call(self, *, silent: int | None = None) -> RollCall:
        """Asks the endpoints what they say of themselves; this host's own is known.

        Args:
            silent: An endpoint that is known not to answer.
        """
        setup = self._setup
        return RollCall(
            self._ask,
            len(setup.endpoints),
            moment_s=setup.pace.ping_s / 5,
            silent=() if silent is None else (silent,),
        )

    async def seek(self, lead: Callable[[int], Awaitable[None]], joining: Callable[[Channel], None]) -> Channel:
        """The connection to who leads, which may be this host.

        Args:
            lead: Begins to lead, in a term; called when it is this host's turn.
            joining: Called with a connection on which the hello was sent: what is told from then on goes there.

        Raises:
            NoLeaderError: There is none in time, or it does not take this host.
        """
        silent, self._silent = self._silent, None
        async with self.roll_call(silent=silent) as roll:
            return await self._seek(roll, lead, joining)

    async def _seek(
        self, roll: RollCall, lead: Callable[[int], Awaitable[None]], joining: Callable[[Channel], None]
    ) -> Channel:
        setup, fenced = self._setup, self._fenced
        start_s = time.monotonic() if fenced is None else fenced.since_s
        limit_s = setup.join_s if self._state.leader is None else setup.seek_s
        refused_s, reason, next_word_s, next_look_s = 0.0, "" if fenced is None else fenced.reason, _WORD_S, _LOOK_S
        while (waited_s := time.monotonic() - start_s) < limit_s:
            if waited_s > next_look_s:
                next_look_s = waited_s + _WORD_S
                await self._see_whether_it_is_over()
            if waited_s > next_word_s:
                next_word_s = waited_s + _WORD_S
                setup.say(f"host {self._state.host} has no leader: {reason}; looks for {limit_s - waited_s:.0f} s more")
            choice = await self._choose(roll, has_waited=waited_s > setup.first_s)
            if isinstance(choice, Lead):
                await self._see_whether_it_is_over()
                await self._judge_suspect()
                await lead(choice.term)
                assert setup.own is not None, "it is this one's turn"
                choice = Join(setup.own)
            if isinstance(choice, Join):
                try:
                    channel = await self._join(choice.index, joining)
                    if choice.index != setup.own:
                        self.unfence()
                    return channel
                except _RefusedError as error:  # a name that is in use may still be that of a process that died
                    reason = str(error)
                    refused_s += setup.pace.ping_s
                    if refused_s > 3 * setup.pace.deadline_s:
                        raise NoLeaderError(reason) from error
                    await asyncio.sleep(setup.pace.ping_s)
                except OSError as error:
                    reason = str(error)
            else:
                reason = choice.reason if fenced is None else fenced.reason
            await asyncio.sleep(setup.pace.ping_s / 5)
        endpoints = ", ".join(str(endpoint) for endpoint in setup.endpoints)
        raise NoLeaderError(f"no leader was found at {endpoints} within {limit_s:g} s: {reason}")

    async def _judge_suspect(self) -> None:
        """A process that dies still listens for a moment."""
        for _ in range(_LOOKS):
            if self._suspect is None or await self._ask(self._suspect) is not None:
                break
            await asyncio.sleep(self._setup.pace.ping_s / _LOOKS)
        self._suspect = None

    async def _see_whether_it_is_over(self) -> None:
        """The fence tells those that come too late."""
        fence, run = self._setup.fence, self._state.run
        if fence is None or run is None:
            return
        look = functools.partial(_ended, fence, run)
        try:
            end = await aside(look, timeout_s=self._setup.pace.deadline_s, what="the end of the run")
        except LaunchError as error:
            self._setup.say(str(error))
            return
        if end is not None:
            raise NoLeaderError(
                f"run {run} is over: {end.reason}; to go on with it, give another folder with --fence",
                exit_code=end.exit_code,
            )

    async def _choose(self, roll: RollCall, *, has_waited: bool) -> Choice:
        is_fenced = self._fenced is not None and time.monotonic() < self._fenced.until_s
        own = None if is_fenced else self._setup.own
        return choose(await roll.statuses(), own=own, has_waited=has_waited)

    async def _join(self, index: int, joining: Callable[[Channel], None]) -> Channel:
        channel = await self._dial(index)
        try:
            channel.send(messages.hello_to_json(self._state.hello()))
            joining(channel)
            reply = await channel.receive()
            if reply.get("kind") == "refused" and reply.get("is_final") is True:
                raise NoLeaderError(f"{self._setup.endpoints[index]} does not take this host: {reply.get('reason')}")
            if reply.get("kind") != "welcome":
                raise _RefusedError(str(reply.get("reason")))
            state = self._state
            state.leader, state.term, state.run = str(reply["host"]), int(reply["term"]), str(reply["run"])
            state.lost_s = None
        except BaseException as error:
            await channel.close(f"not joined: {error}")
            raise
        self._leader_index = index
        return channel

    async def _ask(self, index: int) -> Status | None:
        if index == self._setup.own:
            return self._own_status()
        try:
            channel = await self._dial(index)
        except WrongSecretError as error:
            if self._state.leader is None:
                raise NoLeaderError(
                    f"who answers at {self._setup.endpoints[index]} has another secret; give all hosts the same one"
                ) from error
            return None
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and index == self._suspect and self._state.lost is not None:
                self._state.lost = (self._state.lost[0], True)  # its host is there, and nobody listens
                self._suspect = None
            return None
        try:
            channel.send({"kind": "status"})
            return messages.status_from_json(await channel.receive())
        except ConnectionError:
            return None
        finally:
            await channel.close("that was all")

    async def _dial(self, index: int) -> Channel:
        setup = self._setup
        return await dial(setup.endpoints[index], setup.secret, setup.pace, timeout_s=2 * setup.pace.ping_s)


def _ended(folder: Path, run: str) -> End | None:
    return Fence(folder, run).ended()
