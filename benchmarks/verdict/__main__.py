"""How often the verdict names what was put into a run: slow storage, a slow link, small buckets, a slow rank, ...

    python -m benchmarks.verdict                                   # the sets for judging
    python -m benchmarks.verdict --set train --cases 40 --list     # those that rules are made with
    python -m benchmarks.verdict --work DIR --limit-s 480          # a part; the same again goes on

Each run is a real Lightning training of some 40 steps by 4 ranks on 2 hosts, which are network namespaces, with
``StepTimeline`` and ``ClusterMonitor``; its files are read and judged as those of any run. All about it is drawn from
its seed. Compute of the model is mostly sleep, which takes no core, so that four ranks fit on two; bytes, buckets,
links, drops, reads and checkpoints are real. A store that takes its time sleeps in proportion to bytes. What counts as
a case, and how a cause's share is measured, says :mod:`benchmarks.verdict.truth`; what counts as right,
:mod:`benchmarks.verdict.scoring`. Seeds for making rules are apart from those for judging.

Needs root and iproute2. Results go to ``benchmarks/results/``.
"""

import sys

from benchmarks.ending import clean_up_when_terminated
from benchmarks.verdict.command import main

if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
