"""What Lightning calls for every Trainer, by the entry points ``*.callbacks_factory``: nothing, unless a doctor asks.

A module of its own beside the package, since importing the package takes a second that others are not to pay.
"""

import os
from typing import Any

VARIABLE = "HIERDIST_DOCTOR"


def callbacks() -> list[Any]:
    """For ``lightning.pytorch.Trainer``."""
    return _callbacks("lightning.pytorch")


def callbacks_of_other_package() -> list[Any]:
    """For ``pytorch_lightning.Trainer``."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[Any]:
    order = os.environ.get(VARIABLE)
    if not order:
        return []
    from lightning_dist.callbacks.doctor import attend  # see above

    attend(order, package)
    return []
