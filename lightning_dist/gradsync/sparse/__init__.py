"""Gradients of which few rows are not zero: the rows travel, and whole tables only where that is cheaper."""

from lightning_dist.gradsync.sparse.average import SparseAverage, has_sparse_gradients, refuse_bounded_rows

__all__ = ["SparseAverage", "has_sparse_gradients", "refuse_bounded_rows"]
