"""How fast a run goes on after a failure, beside torchrun; what it loses, and what it costs to be able to.

    python -m benchmarks.elastic                                              # all parts; hours
    python -m benchmarks.elastic --part recovery --shape 2x2 --fault rank_killed --trials 20
    python -m benchmarks.elastic --part faults --runs 34                      # 300 random faults; once more: more
    python -m benchmarks.elastic --part faults --runs 0 --again               # those runs that were not fine
    python -m benchmarks.elastic --part alarms overhead goodput

Needs root and iproute2. Results go to ``benchmarks/results/``.
"""

import sys

from benchmarks.elastic.command import main
from benchmarks.ending import clean_up_when_terminated

if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
