"""The one table of the guide: each sync with its bytes, its loss and its time, of all parts of a result.

    python -m benchmarks.compression.guide benchmarks/results/2026-12-01-compression.json docs/sync.md

writes it between the page's two markers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compression.arms import DDP, EXACT, OURS, THEIRS
from benchmarks.compression.report import median_steps, times_to_loss

BEGIN = "<!-- measured: begin -->"
END = "<!-- measured: end -->"
SLOW, FREE = "time, 100 Mbit/s", "time, no limit"

Document = Mapping[str, Any]


def table(document: Document) -> Iterator[str]:
    """A line a sync: a dash where nothing was measured."""
    loss, slow, free = (document.get(name) for name in ("loss", SLOW, FREE))
    level = f"{loss['loss_to_reach']:g}" if loss else "a loss"
    yield (
        f"| | times fewer bytes | loss, less that of exact (95 %) | steps to {level} | ms a step, 100 Mbit/s | "
        f"seconds to {level}, 100 Mbit/s | times sooner than {DDP} | ms a step, no limit |"
    )
    yield "|---" * 8 + "|"
    times = times_to_loss(slow, loss) if slow and loss else {}
    for arm in (DDP, *OURS, *(name for name in THEIRS if name != DDP)):
        cells = [
            _fewer(document, arm),
            *_gap(loss, arm),
            _step(slow, arm),
            f"{times[arm]:.1f}" if arm in times else "-",
            f"{times[DDP] / times[arm]:.1f}" if arm in times and DDP in times else "-",
            _step(free, arm),
        ]
        if any(cell != "-" for cell in cells):
            yield f"| {arm if arm in THEIRS else f'`{arm}`'} | {' | '.join(cells)} |"


def _fewer(document: Document, arm: str) -> str:
    counted = document.get("bytes", {}).get("arms", {}).get(f"ddp {arm}")
    if counted is not None:
        return f"{counted['times_fewer']:.1f}"
    arms = document.get(SLOW, {}).get("arms", {})
    if arm in arms and EXACT in arms:  # of the small model
        return f"{arms[EXACT]['bytes_a_host_and_step'] / arms[arm]['bytes_a_host_and_step']:.1f}"
    return "-"


def _gap(loss: Document | None, arm: str) -> tuple[str, str]:
    if loss is None:
        return "-", "-"
    if arm in (EXACT, DDP):
        return "0", median_steps(loss["exact_steps_to_loss"])
    row = loss["arms"].get(arm)
    if row is None:
        return "-", "-"
    interval, exact = row["gap"]["t"], row["loss"]["a"]
    percents = (row["gap"]["mean"] / exact, interval["low"] / exact, interval["high"] / exact)
    mean, low, high = (f"{each:+.2%}" for each in percents)
    return f"{mean} ({low} to {high})", median_steps(row["steps_to_loss"])


def _step(part: Document | None, arm: str) -> str:
    row = None if part is None else part["arms"].get(arm)
    return "-" if row is None else f"{row['median'] * 1e3:.0f}"


def put_in(page: str, lines: Iterator[str]) -> str:
    """The page with the lines between its markers.

    Raises:
        ValueError: It has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return "\n".join([before + BEGIN, "", *lines, "", END + after])


def main() -> int:
    """Write the table of a result into a page."""
    result, page = map(Path, sys.argv[1:3])
    page.write_text(put_in(page.read_text(), table(json.loads(result.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
