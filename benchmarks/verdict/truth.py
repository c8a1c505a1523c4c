"""What was really wrong with a run: stated before any is judged, and measured apart from the monitor.

- What a cause costs is measured by running the same without it: its share is ``1 - step without it / step``. A bubble
  cannot be taken out; it costs what remains of the step beside the sleep that is a stage's compute (and beside the
  other cause, if there is one).
- A run with causes counts if each of them costs at least 15 % of the step.
- A healthy run counts if at least 70 % of the step is compute.
- A run that does not count is made up for by the next seed. It is not looked at whether it is judged right.
"""

from __future__ import annotations

from benchmarks.verdict.performing import Performed

LEAST_SHARE = 0.15
LEAST_COMPUTE = 0.7


def shares(performed: Performed) -> dict[str, float]:
    """Cause -> its share of the step."""
    without = performed.without_s or {}
    found = {}
    for cause, without_s in without.items():
        if without_s is None:
            others = [other_s for other_s in without.values() if other_s is not None]
            cost_s = (others[0] if others else performed.step_s) - performed.compute_s
        else:
            cost_s = performed.step_s - without_s
        found[cause] = cost_s / performed.step_s
    return found


def why_not(performed: Performed) -> str | None:
    """Why a run does not count; ``None``: it does."""
    if performed.failure is not None:
        return "it failed"
    compute = performed.compute_s / performed.step_s
    if not performed.causes:
        return None if compute >= LEAST_COMPUTE else f"healthy, but only {compute:.0%} compute"
    measured = shares(performed)
    cause, least = min(measured.items(), key=lambda item: item[1])
    return f"{cause} costs {least:.0%}" if least < LEAST_SHARE else None
