"""What is worth knowing of a cluster, as values and as tables: pure.

:func:`report_of` computes, :meth:`Report.to_dict` gives what JSON can hold, :func:`tables` what a terminal can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from lightning_dist.laws import transfer_time_s
from lightning_dist.topology.hierarchy import (
    HostTraffic,
    PlacementCost,
    best_order,
    flat_traffic,
    hierarchical_traffic,
    hierarchy_of,
    placement_cost,
)
from lightning_dist.topology.layout import AXIS_NAMES, Layout
from lightning_dist.topology.spec import Cluster, Link, Tier

_SHOWN_GROUPS = 4
_SHOWN_RANKS = 16
_SHOWN_HOSTS = 64


@dataclass(frozen=True)
class GroupSet:
    """Process groups that do the same.

    Attributes:
        name: What they are for.
        tier: The slowest tier that any of them crosses.
        groups: Ranks of each.
    """

    name: str
    tier: Tier
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Report:
    """A cluster and what synchronising a gradient on it costs.

    Attributes:
        cluster: Where the ranks sit.
        sources: Where the identity of each host came from.
        gradient_bytes: Size of the gradient, M.
        groups: The process groups of flat and hierarchical synchronisation, then those of the axes, if any.
        flat: Bytes each host sends a step by one ring in rank order.
        best_flat: The same by one ring in the best order.
        hierarchical: The same by hierarchical synchronisation.
        placement: What the present order costs a flat ring.
        best_order: The ranks in the best order for a flat ring.
    """

    cluster: Cluster
    sources: tuple[str, ...]
    gradient_bytes: float
    groups: tuple[GroupSet, ...]
    flat: tuple[HostTraffic, ...]
    best_flat: tuple[HostTraffic, ...]
    hierarchical: tuple[HostTraffic, ...]
    placement: PlacementCost
    best_order: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; sizes in bytes."""
        hosts = []
        rows = zip(self.cluster.hosts, self.sources, self.flat, self.best_flat, self.hierarchical, strict=True)
        for host, source, flat, best, hierarchical in rows:
            ranks = self.cluster.ranks_of_host(host)
            hosts.append(
                {
                    "host": host,
                    "switch": self.cluster.switch_of(ranks[0]),
                    "ranks": list(ranks),
                    "identity_from": source,
                    "flat_bytes": flat.total_bytes,
                    "best_flat_bytes": best.total_bytes,
                    "hierarchical_bytes": hierarchical.total_bytes,
                }
            )
        return {
            "world_size": self.cluster.world_size,
            "gradient_bytes": self.gradient_bytes,
            "hosts": hosts,
            "links": self.cluster.to_dict().get("links", {}),
            "groups": [
                {"name": g.name, "tier": g.tier.value, "groups": [list(ranks) for ranks in g.groups]}
                for g in self.groups
            ],
            "placement": {**asdict(self.placement), "ratio": self.placement.ratio},
            "best_order": list(self.best_order),
        }


def report_of(
    cluster: Cluster,
    *,
    gradient_bytes: float,
    sources: Sequence[str] | None = None,
    layout: Layout | None = None,
) -> Report:
    """Compute a report.

    Args:
        cluster: Where the ranks sit.
        gradient_bytes: Bytes of gradient a step.
        sources: Where the identity of each rank's host came from; ``None``: it was stated.
        layout: Axes whose groups are to be listed too.
    """
    legs = hierarchy_of(cluster)
    everyone = tuple(range(cluster.world_size))
    groups = [GroupSet("flat: all-reduce", cluster.tier_of(everyone), (everyone,))]
    groups += [
        GroupSet(
            f"hierarchical: {leg.tier.value} reduce-scatter and gather, {_count(leg.width, 'part')}",
            leg.tier,
            leg.groups,
        )
        for leg in legs.inner
    ]
    groups.append(GroupSet(f"hierarchical: all-reduce of {_count(legs.parts, 'part')}", legs.top.tier, legs.top.groups))
    if layout is not None:
        for axis in AXIS_NAMES:
            found = layout.groups(axis)
            if len(found[0]) > 1:
                groups.append(GroupSet(f"axis {axis}", max(cluster.tier_of(group) for group in found), found))
    by_rank = sources or ("stated",) * cluster.world_size
    order = best_order(cluster)
    reordered = Cluster(tuple(cluster.host_of_rank[rank] for rank in order), cluster.switch_of_host)
    best = {traffic.host: traffic for traffic in flat_traffic(reordered, gradient_bytes)}
    return Report(
        cluster=cluster,
        sources=tuple(by_rank[cluster.ranks_of_host(host)[0]] for host in cluster.hosts),
        gradient_bytes=gradient_bytes,
        groups=tuple(groups),
        flat=flat_traffic(cluster, gradient_bytes),
        best_flat=tuple(best[host] for host in cluster.hosts),
        hierarchical=hierarchical_traffic(cluster, gradient_bytes),
        placement=placement_cost(cluster),
        best_order=order,
    )


def tables(report: Report) -> list[Table]:
    """The report for a terminal: hosts, links, groups, and bytes a step."""
    links = [_link_table(report)] if report.cluster.tiers else []
    return [_host_table(report), *links, _group_table(report), _byte_table(report)]


def verdict(report: Report) -> list[str]:
    """Sentences: what hierarchical synchronisation saves, and what the present placement costs."""
    flat = max(traffic.total_bytes for traffic in report.flat)
    hierarchical = max(traffic.total_bytes for traffic in report.hierarchical)
    if report.cluster.num_hosts == 1:
        return ["All ranks are on one host: nothing crosses a network, flat and hierarchical are the same."]
    lines = []
    if hierarchical and flat / hierarchical > 1.005:
        lines.append(f"Hierarchical sends {flat / hierarchical:.2f} times fewer bytes from the busiest host than flat.")
    else:
        lines.append("Hierarchical saves nothing here against flat.")
    if report.placement.ratio > 1:
        order = ", ".join(map(str, report.best_order[:_SHOWN_RANKS]))
        more = ", ..." if report.cluster.world_size > _SHOWN_RANKS else ""
        lines.append(
            f"The present placement costs a flat ring {report.placement.ratio:.2f} times the traffic of the best one "
            f"(ranks by host: {order}{more}); hierarchical sends the same in both."
        )
    else:
        lines.append("The present placement is the best one for a flat ring.")
    return lines


def _host_table(report: Report) -> Table:
    cluster = report.cluster
    table = _titled(f"{_count(cluster.world_size, 'rank')} on {_count(cluster.num_hosts, 'host')}")
    for column in ("host", *(("switch",) if cluster.switches else ()), "ranks", "identity from"):
        table.add_column(column)
    for host, source in list(zip(cluster.hosts, report.sources, strict=True))[:_SHOWN_HOSTS]:
        ranks = cluster.ranks_of_host(host)
        switch = (cluster.switch_of(ranks[0]) or "",) if cluster.switches else ()
        table.add_row(Text(host), *map(Text, switch), _ranks(ranks), source)
    return _more_hosts(table, cluster)


def _link_table(report: Report) -> Table:
    table = _titled("links")
    for column in ("tier", "bandwidth", "latency"):
        table.add_column(column)
    for tier in report.cluster.tiers:
        link = report.cluster.links.get(tier, Link())
        rate, latency = link.bandwidth_bytes_per_s, link.latency_s
        table.add_row(
            tier.value,
            "not measured" if rate is None else f"{rate / 1e6:,.1f} MB/s ({rate * 8 / 1e9:.3g} Gbit/s)",
            "not measured" if latency is None else f"{latency * 1e6:,.0f} us",
        )
    return table


def _group_table(report: Report) -> Table:
    table = _titled("process groups")
    for column in ("for", "crosses", "groups"):
        table.add_column(column)
    for group_set in report.groups:
        shown = " ".join(f"[{_ranks(ranks)}]" for ranks in group_set.groups[:_SHOWN_GROUPS])
        hidden = len(group_set.groups) - _SHOWN_GROUPS
        more = f" and {hidden} more" if hidden > 0 else ""
        # Not markup: a list of ranks in brackets would be taken for a style.
        table.add_row(group_set.name, group_set.tier.value, Text(shown + more))
    return table


def _byte_table(report: Report) -> Table:
    cluster = report.cluster
    title = f"bytes each host sends a step, for a gradient of {report.gradient_bytes / 1e6:,.1f} MB"
    table = _titled(title)
    table.add_column("host")
    for column in ("flat", "flat, best placement", "hierarchical"):
        table.add_column(column, justify="right")
    rows = zip(cluster.hosts, report.flat, report.best_flat, report.hierarchical, strict=True)
    for host, *traffics in list(rows)[:_SHOWN_HOSTS]:
        table.add_row(Text(host), *(_amount(traffic, cluster) for traffic in traffics))
    return _more_hosts(table, cluster)


def _amount(traffic: HostTraffic, cluster: Cluster) -> str:
    """Megabytes, and the seconds they take if the links were measured."""
    text = f"{traffic.total_bytes / 1e6:,.1f} MB"
    needed = ((Tier.SWITCH, traffic.switch_bytes), (Tier.WORLD, traffic.world_bytes))
    seconds = 0.0
    for tier, size_bytes in needed:
        rate = cluster.links.get(tier, Link()).bandwidth_bytes_per_s
        if size_bytes and rate is None:
            return text
        if size_bytes and rate is not None:
            seconds += transfer_time_s(size_bytes, rate)
    return f"{text}, {seconds:.3g} s" if seconds else text


def _titled(title: str) -> Table:
    """A table as wide as its title, which rich would break otherwise."""
    return Table(title=title, title_justify="left", min_width=len(title))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _more_hosts(table: Table, cluster: Cluster) -> Table:
    if cluster.num_hosts > _SHOWN_HOSTS:
        table.caption = f"and {cluster.num_hosts - _SHOWN_HOSTS} more hosts (--json lists all)"
    return table


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks, runs of three and more as first-last, and not more than fit into a line."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(parts[:_SHOWN_RANKS]) + (",..." if len(parts) > _SHOWN_RANKS else "")
