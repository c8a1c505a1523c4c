"""A host's link, cut or slowed, with iproute2; each act gives back what undoes it. Needs root.

Note: how a link is cut.
    What goes out ends in the queueing discipline ``blackhole``. What comes in is dropped by a routing rule for the
    interface; the rule for local addresses, which comes before all others, is moved behind it. The link keeps its
    carrier, addresses and routes: nobody is told, as with a switch that fails. Kernels of all ages can do this; filters
    (nftables, tc) need modules that are not everywhere.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable, Sequence

from lightning_dist.elastic.chaos.host.refusal import Refused

_FAMILIES = ("-4", "-6")
_DROP, _LOCAL = "1", "2"  # preferences of the two rules

Undo = Callable[[], None]


def cut(interface: str, direction: str) -> Undo:
    """Let nothing pass.

    Args:
        interface: Name of a network interface of this host.
        direction: ``in``, ``out`` or ``both``.

    Raises:
        Refused: It cannot be done here.
    """
    _check(interface)
    undo: list[Undo] = []
    if direction in ("out", "both"):
        undo.append(_replace_queue(interface, ("blackhole",)))
    if direction in ("in", "both"):
        try:
            undo.append(_drop_incoming(interface))
        except Refused:
            _all(undo)
            raise
    return lambda: _all(undo)


def slow(interface: str, rate_mbit: float) -> Undo:
    """Send no faster than so many Mbit/s.

    Raises:
        Refused: It cannot be done here.
    """
    _check(interface)
    rate = f"{max(8, round(rate_mbit * 1000))}kbit"
    return _replace_queue(interface, ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms"))


def _replace_queue(interface: str, queue: Sequence[str]) -> Undo:
    """Another queueing discipline; what was there comes back."""
    before = _root_queue(_run("tc", "qdisc", "show", "dev", interface))
    _run("tc", "qdisc", "replace", "dev", interface, "root", *queue)
    if before is None:
        return lambda: _ignored("tc", "qdisc", "del", "dev", interface, "root")
    return lambda: _ignored("tc", "qdisc", "replace", "dev", interface, "root", *before)


def _root_queue(shown: str) -> list[str] | None:
    """The discipline at the root as ``tc`` takes it; ``None``: the kernel's own choice, which comes back by itself.

    Raises:
        Refused: It is one that could not be put back.
    """
    for line in shown.splitlines():
        words = line.split()
        if len(words) < 4 or words[0] != "qdisc" or words[3] != "root":
            continue
        kind, handle = words[1], words[2]
        if handle == "0:":
            return None
        if kind == "tbf":
            values = dict(zip(words[6::2], words[7::2], strict=False))  # after "refcnt N"
            return ["tbf", "rate", values["rate"], "burst", values["burst"], "latency", values["lat"]]
        raise Refused(f"the interface has the queueing discipline {kind}, which could not be put back afterwards")
    return None


def _drop_incoming(interface: str) -> Undo:
    """Rules by which it is dropped; they are undone in the reverse order, so that local addresses stay found."""
    undo: list[Undo] = []
    try:
        for family in _FAMILIES:
            if family == "-6" and not _run("ip", "-6", "addr", "show", "dev", interface):
                continue  # it has no such addresses, and the kernel may have no such rules
            rule = ("ip", family, "rule")
            for adding, removing in (
                (("add", "pref", _LOCAL, "lookup", "local"), ("del", "pref", _LOCAL)),
                (("add", "pref", _DROP, "iif", interface, "blackhole"), ("del", "pref", _DROP)),
                (("del", "pref", "0"), ("add", "pref", "0", "lookup", "local")),
            ):
                _run(*rule, *adding)
                undo.insert(0, functools.partial(_ignored, *rule, *removing))
    except Refused:
        _all(undo)
        raise
    return lambda: _all(undo)


def _check(interface: str) -> None:
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise Refused(f"links are cut and slowed with the command {program} (package iproute2), which is missing")
    _run("ip", "link", "show", "dev", interface)


def _all(undo: Sequence[Undo]) -> None:
    for each in undo:
        each()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30.0)
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stderr.strip() or f'ended with {done.returncode}'}")
    return done.stdout


def _ignored(*command: str) -> None:
    """Where what is to be undone may be gone: with the interface, or half done."""
    subprocess.run(command, capture_output=True, check=False, timeout=30.0)
