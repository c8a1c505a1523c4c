"""``python -m benchmarks.compression``."""

import sys

from benchmarks.compression.command import main
from benchmarks.ending import clean_up_when_terminated

clean_up_when_terminated()
sys.exit(main(sys.argv[1:]))
