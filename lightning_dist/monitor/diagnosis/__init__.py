"""Why steps take as long as they do: pure rules over a run's record.

:func:`~lightning_dist.monitor.diagnosis.diagnose.diagnose` reads top down: ``window`` picks the steps, ``evidence``
computes what the rules look at, ``rules`` lists them, and each cause has a file of its own.
"""

from __future__ import annotations

from lightning_dist.monitor.diagnosis.diagnose import diagnose

__all__ = ["diagnose"]
