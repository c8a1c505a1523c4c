"""What can be done to a run: each kind of fault, who does it, and which options it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.config.checks import check_choice, check_count, check_range

DIRECTIONS = ("both", "in", "out")
PLACES = ("storage", "memory")
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
REQUIRED = object()


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        summary: What happens. ``seconds`` is always how long it lasts; a command that it ended is started again then.
        by_rank: Done by the rank itself; else by the conductor of a host.
        options: Beyond ``rank`` and ``step`` -> default; :data:`REQUIRED`: there is none.
    """

    summary: str
    by_rank: bool
    options: Mapping[str, Any] = field(default_factory=dict)


_ON_HOST: dict[str, Any] = {"host": None}
"""The host; ``None``: that of the rank."""

KINDS: dict[str, Kind] = {
    "kill": Kind("the rank gets SIGKILL", True),
    "exception": Kind("the rank raises an error", True),
    "exit": Kind("the rank's process ends with an exit code", True, {"code": 1}),
    "signal": Kind("the rank gets a signal that asks it to end (preemption)", True, {"signal": "SIGTERM"}),
    "enospc": Kind("the rank's next writes of checkpoints find the disk full", True, {"writes": 1}),
    "oom": Kind("the kernel kills the rank for want of memory", False),
    "stop": Kind("the rank is stopped (SIGSTOP), for some seconds or for good", False, {"seconds": None}),
    "agent": Kind("the launched command gets SIGKILL; started again after some seconds, or not", False, {
        **_ON_HOST, "seconds": None}),
    "host": Kind("all processes of the launched command get SIGKILL; started again after some seconds, or not", False, {
        **_ON_HOST, "seconds": None}),
    "cut": Kind("a host's link passes nothing, in one direction or both", False, {
        **_ON_HOST, "interface": REQUIRED, "direction": "both", "seconds": None}),
    "slow_link": Kind("a host's link sends no faster than a rate", False, {
        **_ON_HOST, "interface": REQUIRED, "rate_mbit": REQUIRED, "seconds": None}),
    "slow_host": Kind("the ranks of a host are stopped for a share of the time", False, {
        **_ON_HOST, "share": 0.75, "seconds": 5.0}),
    "torn": Kind("a file of the newest checkpoint loses its second half", False, {
        **_ON_HOST, "place": "storage", "folder": None}),
    "keeper": Kind("the process that keeps checkpoints in memory gets SIGKILL", False, {**_ON_HOST, "folder": None}),
    "store": Kind("the process that holds the ranks' rendezvous store gets SIGKILL", False, {"seconds": None}),
}  # fmt: skip

CHECKS: dict[str, Callable[[str, Any], None]] = {
    "code": lambda what, given: check_count(what, given, low=1, high=255, unit="as exit code"),
    "writes": lambda what, given: check_count(what, given, low=1, unit="writes"),
    "seconds": lambda what, given: check_range(what, given, low=0.05, unit="seconds"),
    "rate_mbit": lambda what, given: check_range(what, given, low=0.01, unit="Mbit/s"),
    "share": lambda what, given: check_range(what, given, low=0.05, high=0.98, unit="of the time"),
    "direction": lambda what, given: check_choice(what, given, DIRECTIONS),
    "place": lambda what, given: check_choice(what, given, PLACES),
    "signal": lambda what, given: check_choice(what, given, SIGNALS),
}
"""Of an option's value, by its name; the rest is text."""
