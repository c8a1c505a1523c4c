"""What Lightning calls for every Trainer, by the entry points ``*.callbacks_factory``: nothing, unless it is compared.

A module of its own beside the package, since importing the package takes a second that others are not to pay.
"""

import os
from typing import Any

VARIABLE = "HIERDIST_CURVE"


def callbacks() -> list[Any]:
    """For the Trainers of ``lightning.pytorch`` and ``pytorch_lightning``."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return []
    from lightning_dist.callbacks.learning_curve import LearningCurve  # see above

    return [LearningCurve(folder)]
