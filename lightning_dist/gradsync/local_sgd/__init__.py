"""Local SGD and DiLoCo: workers train apart, and now and then average how far they have gone."""

from lightning_dist.gradsync.local_sgd.outer import OuterOptimizer
from lightning_dist.gradsync.local_sgd.schedule import Timetable
from lightning_dist.gradsync.local_sgd.scheme import LocalSGD, Workers
from lightning_dist.gradsync.local_sgd.weights import OuterWeights

__all__ = ["LocalSGD", "OuterOptimizer", "OuterWeights", "Timetable", "Workers"]
