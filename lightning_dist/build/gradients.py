"""Gradient synchronisation of a model that is whole on each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from lightning_dist.build.feedback import feedback_of
from lightning_dist.build.run import RunContext, describe_ranks, side_stream
from lightning_dist.build.tables import TableService
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.comm.opening import open_all_reduce
from lightning_dist.config import MIB, ParallelConfig, SyncConfig
from lightning_dist.gradsync.allreduce import AllReduceScheme
from lightning_dist.gradsync.data_parallel import DataParallel
from lightning_dist.gradsync.powersgd import LowRankFeedback, PowerSGDScheme, description
from lightning_dist.gradsync.sparse import SparseAverage, has_sparse_gradients, refuse_bounded_rows
from lightning_dist.gradsync.sparse.choice import limit_of
from lightning_dist.topology import Tier


def open_gradient_all_reduce(run: RunContext, sync: SyncConfig) -> HierarchicalAllReduce:
    """Lanes, groups and shared memory for gradients; every rank calls it."""
    with run.collectives.opening("opening the gradients' groups", run.world):
        return open_all_reduce(
            run.cluster,
            config=sync,
            collectives=run.collectives,
            device=run.device,
            rank=run.rank,
            store=run.store,
            feedback=feedback_of(run, sync, mode="ddp"),
        )


def wrap_data_parallel(
    module: torch.nn.Module,
    all_reduce: HierarchicalAllReduce,
    sparse: SparseAverage | None = None,
    *,
    run: RunContext,
    parallel: ParallelConfig,
    sync: SyncConfig,
    extra: Mapping[str, object],
    low_rank: LowRankFeedback | None = None,
    inside: RankGroup | None = None,
) -> DataParallel:
    """Wrap a module so that its gradients are averaged by ``all_reduce``; every rank calls it.

    Args:
        module: On the run's device already.
        all_reduce: How dense buckets travel.
        sparse: How sparse buckets travel; see :func:`open_sparse_average`.
        run: For the seam and the device.
        parallel: Options of the wrapper.
        sync: For the size of buckets.
        extra: Further arguments of :class:`~torch.nn.parallel.DistributedDataParallel`, as the user gave them.
        low_rank: What is kept of matrices that travel as factors; ``None``: all travel whole.
        inside: The ranks that train together, and have the same values already; all ranks, and rank 0's values, if not
            given.
    """
    arguments: dict[str, object] = {
        "find_unused_parameters": parallel.find_unused_parameters,
        "static_graph": parallel.static_graph,
        "gradient_as_bucket_view": parallel.gradient_as_bucket_view,
        "bucket_cap_mb": sync.bucket_bytes / MIB,
        **extra,
    }
    if not parallel.broadcast_buffers:  # torch 2.13 warns of it by name, also at its default
        arguments["broadcast_buffers"] = False
    if inside is not None:
        arguments.update(process_group=inside.process_group, init_sync=False)
    with side_stream(run.device), run.collectives.opening("wrapping the model", run.world):
        device_ids = [run.device.index] if run.device.type == "cuda" else None
        wrapped = DataParallel(module, operation=run.operation, device_ids=device_ids, **arguments)
    if low_rank is None:
        AllReduceScheme(all_reduce, sparse).attach(wrapped)
    else:
        PowerSGDScheme(all_reduce, low_rank, sparse).attach(wrapped)
    return wrapped


def open_sparse_average(
    run: RunContext,
    module: torch.nn.Module,
    all_reduce: HierarchicalAllReduce,
    *,
    sync: SyncConfig,
    announce: Callable[[str], None],
    tables: TableService | None = None,
) -> SparseAverage | None:
    """Lanes and groups for the module's sparse gradients, if it has any; every rank calls it.

    Args:
        run: Who sits where, and the seam.
        module: Whose gradients they are.
        all_reduce: How tables travel of which most rows have gradients.
        sync: Options.
        announce: Says which way each table goes, and why.
        tables: What is dealt to the ranks instead.

    Raises:
        CombinationError: Tables would come to differ between ranks.
    """
    if run.cluster.world_size > 1:
        refuse_bounded_rows(module)
    if not has_sparse_gradients(module, but={} if tables is None else tables.tables.by_parameter):
        return None
    crosses = run.cluster.num_hosts > 1
    link = run.cluster.links.get(Tier.WORLD if crosses else Tier.HOST)
    given = sync.sparse.dense_above
    if given is None and sync.codec != "same":
        given = 1.0  # rows cross as they are; a whole table would be encoded
    limit = partial(
        limit_of,
        given=given,
        rate_bytes_per_s=link.bandwidth_bytes_per_s if link is not None else None,
        crosses=crosses,
    )
    with run.collectives.opening("opening the groups of sparse gradients", run.world):
        return SparseAverage(
            run.cluster.flattened() if sync.algorithm == "flat" else run.cluster,
            run.collectives,
            run.own_store("sparse"),
            dense=all_reduce,
            names={parameter: name for name, parameter in module.named_parameters()},
            limit=limit,
            announce=announce,
        )


def describe(
    run: RunContext,
    all_reduce: HierarchicalAllReduce,
    *,
    module: torch.nn.Module | None = None,
    low_rank: LowRankFeedback | None = None,
) -> str:
    """Who takes part and which way gradients go, in a line.

    Args:
        run: Who takes part.
        all_reduce: Which way gradients go.
        module: Whose gradients they are.
        low_rank: What is kept of matrices that travel as factors; ``None``: all travel whole.
    """
    said = f"hierdist: {describe_ranks(run.cluster)}; gradients: {all_reduce.description}"
    if module is None or low_rank is None:
        return said
    trained = [parameter.shape for parameter in module.parameters() if parameter.requires_grad]
    return f"{said}; {description(trained, low_rank.columns)}"
