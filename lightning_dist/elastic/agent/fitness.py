"""Whether this host may join: what a check finds may pass, as a link that others use up, and is looked at again."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_dist.elastic.agent.host_parts import HostParts
from lightning_dist.elastic.policy.events import HostUnhealthy
from lightning_dist.elastic.session import End

CHECKS = 4
"""So often a host is checked before it ends."""
AGAIN_S = 10.0
"""From one check to the next, in seconds."""
HEARD_S = 5.0
"""How long a host that is not fit waits for a leader to hear that, in seconds."""
_UNFIT = "this host is not fit to train"


def prove_fit(parts: HostParts, check: Callable[[], str | None], *, again_s: float = AGAIN_S) -> End | None:
    """Check this host until it is fit; how the run ends here if it does not come to that.

    Args:
        parts: Of its agent.
        check: Says what is wrong with this host, or ``None``: it is well.
        again_s: From one check to the next, in seconds.
    """
    problem = check()
    for left in reversed(range(1, CHECKS)):
        if problem is None:
            return None
        parts.say(f"{_UNFIT}: {problem}; it is checked again in {again_s:g} s, {left} times at most")
        if (end := _wait(parts, again_s)) is not None:
            return end
        problem = check()
    if problem is None:
        return None
    parts.session.tell(HostUnhealthy(parts.host, problem))
    parts.session.told(HEARD_S)
    return End(1, f"{_UNFIT}: {problem}")


def _wait(parts: HostParts, seconds: float) -> End | None:
    orders, due_s = parts.orders, time.monotonic() + seconds
    while (left_s := due_s - time.monotonic()) > 0:
        order = orders.next(left_s)
        if isinstance(order, End) or orders.leaving is not None:
            return order if isinstance(order, End) else orders.leaving
    return None
