"""``make bench``: every scenario of every benchmark."""

import sys

from benchmarks.step_time import main

sys.exit(main(sys.argv[1:] or ["--all"]))
