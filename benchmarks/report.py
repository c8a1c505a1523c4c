"""Turn a result of :mod:`benchmarks.step_time` into Markdown.

python -m benchmarks.report benchmarks/results/2026-11-29-step-time.json >
benchmarks/results/2026-11-29-step-time.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def markdown(document: dict[str, Any]) -> Iterator[str]:
    """Lines: a table a scenario, with command, date and commit."""
    yield "# Step time and bytes of gradient synchronisation"
    yield ""
    yield (
        "6 x [768 -> 3072 -> 768] MLP blocks in fp32 (M = 113 MB of gradients), SGD, one thread a rank, hosts are "
        "network namespaces on one two-core machine. Ratios are medians over rounds in which all arms ran one after "
        "another; beside them the smallest and the largest. Bytes are those of the link's counter, headers included. "
        "Wire efficiency is the wire limit 2M(H-1)/H over the rate, divided by the step less the compute that nothing "
        "hides: by the time from when the last rank has its first bucket until the last bucket is back."
    )
    for name, result in document["results"].items():
        scenario = result["scenario"]
        base = scenario["arms"][0]
        rate = f"{scenario['rate_mbit']:g} Mbit/s" if scenario["rate_mbit"] else "no limit"
        compute = scenario["load"]["compute_s"]
        yield ""
        yield f"## {name}: {rate}" + (f", {compute:g} s of pretended compute a step" if compute else "")
        yield ""
        yield f"{result['date']}, commit {result['commit']}: `{result['command']}`"
        if "note" in result:
            yield ""
            yield result["note"]
        yield ""
        yield f"| arm | step, s | times faster than {base} | bytes a host / M | wire efficiency |"
        yield "|---|---|---|---|---|"
        for arm, row in result["arms"].items():
            low, high = row["ratio_spread"]
            ratio = f"{row[f'times_faster_than_{base}']:.2f} ({low:.2f}-{high:.2f})"
            efficiency = f"{row['wire_efficiency']:.3f}" if arm == "hierdist" and "wire_efficiency" in row else ""
            sent = f"{row['bytes_per_host_over_gradients']:.3f}" if row["bytes_per_host_over_gradients"] else ""
            yield f"| {arm} | {row['step_s']:.3f} | {ratio} | {sent} | {efficiency} |"


def main() -> int:
    """Print the Markdown of one file."""
    print("\n".join(markdown(json.loads(Path(sys.argv[1]).read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
