"""What a loader takes of its sources, by what they are for: training, evaluation or prediction."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from lightning_dist.config import DataConfig
from lightning_dist.data.loading.source import Source
from lightning_dist.data.order.dealing import Dealing
from lightning_dist.data.order.mixture import Mixture
from lightning_dist.data.order.replicas import Replicas
from lightning_dist.data.order.sample_order import Order, OrderOptions, SampleOrder
from lightning_dist.data.order.shares import ReplicaShare
from lightning_dist.data.order.steps import EndlessSteps, ExactSteps, Steps

ROLES = ("train", "evaluate", "predict")


def share_of(
    sources: Sequence[Source], config: DataConfig, role: str, replicas: Replicas, *, epoch_samples: int | None = None
) -> ReplicaShare:
    """What the own replica takes.

    Args:
        sources: Mixed, if there are several.
        config: Options.
        role: One of :data:`ROLES`.
        replicas: Who takes.
        epoch_samples: Samples of an epoch of a mixture.

    Raises:
        ConfigError: There are too few samples, or options do not fit them.
    """
    order = _order_of(sources, config, role, epoch_samples)
    dealing = Dealing(replicas.host_of, order.lanes)
    shared = dealing.shared_lanes()
    if shared is not None and role == "train" and replicas.own == 0 and any(source.is_fetched for source in sources):
        warnings.warn(
            f"with data.lanes={order.lanes}, hosts {', '.join(map(str, shared.hosts))} read shards of others too, so "
            f"storage is read more than once: write data.lanes={shared.write_lanes}, from the start of the run",
            stacklevel=2,
        )
    return ReplicaShare(order, _steps_of(order, config, role, replicas.count), dealing, replicas.own)


def _order_of(sources: Sequence[Source], config: DataConfig, role: str, epoch_samples: int | None) -> SampleOrder:
    options = OrderOptions(
        seed=config.seed,
        lanes=1 if role == "predict" else config.lanes,
        shuffle_block=config.shuffle_block,
        shuffle=config.shuffle and role == "train",
    )
    orders = [Order(source.index.samples, options, source=number) for number, source in enumerate(sources)]
    if len(orders) == 1 and epoch_samples is None:
        return orders[0]
    return Mixture(orders, [source.weight for source in sources], epoch_samples=epoch_samples)


def _steps_of(order: SampleOrder, config: DataConfig, role: str, num_replicas: int) -> Steps:
    total = config.batch_size * num_replicas
    trains = role == "train"
    if trains and config.epoch == "endless":
        return EndlessSteps(num_samples=order.num_samples, num_replicas=num_replicas, batch_size=total)
    return ExactSteps(
        num_samples=order.num_samples,
        num_replicas=num_replicas,
        batch_size=total,
        last_batch=config.last_batch if trains else "short",
        repeats=not trains,
    )
