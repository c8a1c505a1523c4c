"""How fast training data are streamed, beside LitData, MosaicML Streaming, WebDataset and a mapped file.

    python -m benchmarks.data                                        # every scenario
    python -m benchmarks.data --scenario store:1gbit --rounds 5
    python -m benchmarks.data --scenario local --arms litdata mapped

All arms read the same samples of 4 KB, each in its library's own format and with its own cache, on the same hosts in
turn; figures are medians over rounds, ratios are medians of those within a round. ``cold`` is the first epoch, with an
empty cache (``local``: with nothing in the page cache), ``warm`` the next. Bytes are those of the store's link. Needs
root and iproute2; the peers are installed by ``pip install --no-deps -r benchmarks/data/peers.txt``, and left out
where they are missing. Results go to ``benchmarks/results/``.
"""

import sys

from benchmarks.data.command import main
from benchmarks.ending import clean_up_when_terminated

if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
