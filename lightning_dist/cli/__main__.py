"""``python -m lightning_dist.cli``."""

import sys

from lightning_dist.cli import main

sys.exit(main())
