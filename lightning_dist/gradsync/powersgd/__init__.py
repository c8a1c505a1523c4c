"""Gradients as products of thin matrices: PowerSGD, with error feedback."""

from lightning_dist.gradsync.powersgd.factors import description
from lightning_dist.gradsync.powersgd.rows import RowProducts
from lightning_dist.gradsync.powersgd.scheme import PowerSGDScheme
from lightning_dist.gradsync.powersgd.state import LowRankFeedback

__all__ = ["LowRankFeedback", "PowerSGDScheme", "RowProducts", "description"]
