"""Who sits where: hosts, switches and links as values, and what follows from them.

:mod:`~lightning_dist.topology.spec`, :mod:`~lightning_dist.topology.hierarchy` and
:mod:`~lightning_dist.topology.layout` are pure; :mod:`~lightning_dist.topology.discover` reads the environment and
:mod:`~lightning_dist.topology.probe` measures the links, so these two are imported only where they are needed.
"""

from lightning_dist.topology.hierarchy import Hierarchy, Leg, hierarchy_of
from lightning_dist.topology.layout import Axes, Layout
from lightning_dist.topology.spec import Cluster, Link, Tier

__all__ = ["Axes", "Cluster", "Hierarchy", "Layout", "Leg", "Link", "Tier", "hierarchy_of"]
