"""Tensor parallelism: the layers of a model split over the ranks of a host, by plans on names.

:func:`parallelize` splits a model in place. ``styles`` holds the vocabulary of plans and the ready ones, ``plan``
checks a plan against ``survey``'s facts, ``layers`` says what a layer does on each rank, ``region`` which random
numbers it draws, ``logits`` what may become of split logits; ``mesh`` makes the mesh, ``optimizers``
looks at optimizers, ``part_tensors`` gathers whole tensors, ``wrapped`` is called by a strategy.
``docs/tensor.md`` is the how-to.
"""

from lightning_dist.parallel.tensor.links import TensorLinks
from lightning_dist.parallel.tensor.mesh import PlacedMesh, make_mesh
from lightning_dist.parallel.tensor.model import SplitParameter, TensorParallel, parallelize
from lightning_dist.parallel.tensor.optimizers import (
    keep_kinds_apart,
    keep_list_options,
    refuse_unsplit,
    refuse_whole_only,
)
from lightning_dist.parallel.tensor.plan import Split, split_model
from lightning_dist.parallel.tensor.styles import READY_PLANS, STYLES
from lightning_dist.parallel.tensor.survey import survey

__all__ = [
    "parallelize",
    "TensorParallel",
    "TensorLinks",
    "SplitParameter",
    "make_mesh",
    "PlacedMesh",
    "split_model",
    "survey",
    "Split",
    "READY_PLANS",
    "STYLES",
    "keep_kinds_apart",
    "keep_list_options",
    "refuse_unsplit",
    "refuse_whole_only",
]
