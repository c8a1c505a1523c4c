"""Formulas that predictions and reports rest on: pure, with units in the names and the source in the docstring.

Sizes are bytes, rates bytes a second, times seconds. A link of 200 Mbit/s is ``200e6 / 8`` bytes a second.
"""

from __future__ import annotations

import math


def ring_all_reduce_bytes(size_bytes: float, ranks: int) -> float:
    """Bytes each of n ranks sends when M bytes are all-reduced by a ring: 2M(n-1)/n.

    It receives as many meanwhile. Half of them go there (the reduce-scatter), half come back (the all-gather). 70
    billion gradients in bf16 are 140 GB, and as n grows a rank sends nearly 280 GB.

    The lower bound for any all-reduce in which all ranks send alike: Patarasu and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", JPDC 2009.
    """
    _check_count("ranks", ranks)
    return 2 * size_bytes * (ranks - 1) / ranks


def ring_reduce_scatter_bytes(size_bytes: float, ranks: int) -> float:
    """Bytes each of n ranks sends when M bytes are reduce-scattered, or all-gathered, by a ring: M(n-1)/n.

    Half of :func:`ring_all_reduce_bytes`, which is the one after the other.
    """
    return ring_all_reduce_bytes(size_bytes, ranks) / 2


def flat_bytes_per_host(size_bytes: float, ranks: int, *, leaving_edges: int = 1) -> float:
    """Bytes a host sends to others when M bytes are all-reduced by one ring over n ranks: k * 2M(n-1)/n.

    Args:
        size_bytes: M.
        ranks: n, all ranks of all hosts.
        leaving_edges: k, how many of the host's ranks have their successor on another host: 1 if the host's ranks are
            contiguous in the ring, all of them if they are dealt to the hosts in turn, 0 on a single host.
    """
    return leaving_edges * ring_all_reduce_bytes(size_bytes, ranks)


def hierarchical_bytes_per_host(size_bytes: float, hosts: int) -> float:
    """Bytes each of H hosts sends to others when M bytes are reduced in the host first: 2M(H-1)/H.

    The hosts act as the ranks of :func:`ring_all_reduce_bytes`: each part of M is all-reduced over H owners, and the
    parts of a host add up to M. Independent of the number of ranks a host and of their order.
    """
    return ring_all_reduce_bytes(size_bytes, hosts)


def row_exchange_bytes_per_host(rows: float, union: float, row_bytes: float, hosts: int) -> float:
    """Bytes each of H hosts sends when each has U rows of b bytes, and V of all rows are in any's.

    Two hosts send each other all they have: U b. More deal their rows to owners, (H-1)/H of them, and each owner sends
    what it has merged, V/H rows, to the others: (H-1)/H (U + V) b.

    Args:
        rows: U, rows of a host.
        union: V, rows of all hosts, each counted once.
        row_bytes: b, of a row's values and its number.
        hosts: H.
    """
    _check_count("hosts", hosts)
    if hosts == 2:
        return rows * row_bytes
    return (hosts - 1) / hosts * (rows + union) * row_bytes


_MERGE_S_PER_BYTE = 1.5e-9
_SUM_S_PER_BYTE = 2.5e-10


def row_break_even_share(
    row_bytes: float,
    index_bytes: float,
    *,
    rate_bytes_per_s: float,
    merge_s_per_byte: float = _MERGE_S_PER_BYTE,
    sum_s_per_byte: float = _SUM_S_PER_BYTE,
) -> float:
    """Share of a table's rows from which on the whole table is cheaper to average than its rows.

    As rows, D of N rows of r bytes cost D N ((r + i) / rate + m r), where i is what the number of a row takes and m
    what merging does; the whole table costs N (r / rate + s r), s being what a sum in place does. On a slow link the
    share comes near r / (r + i), on a fast one the cost of merging decides.

    Args:
        row_bytes: r, of a row's values.
        index_bytes: i.
        rate_bytes_per_s: Of the link between those who exchange.
        merge_s_per_byte: m. The default was measured on one core of an x86 server: 1.5 ns.
        sum_s_per_byte: s. The default was measured there: 0.25 ns.
    """
    _check_rate(rate_bytes_per_s)
    if not (row_bytes > 0 and index_bytes >= 0):
        raise ValueError(f"row_bytes must be positive and index_bytes not negative, got {row_bytes} and {index_bytes}")
    whole_s = row_bytes * (1 / rate_bytes_per_s + sum_s_per_byte)
    as_rows_s = (row_bytes + index_bytes) / rate_bytes_per_s + row_bytes * merge_s_per_byte
    return whole_s / as_rows_s


def hierarchical_gain(ranks: int, hosts: int, *, leaving_edges: int = 1) -> float:
    """How many times fewer bytes a host sends hierarchically than by a flat ring; 1.0 on one host.

    k(n-1)/n over (H-1)/H: at 2 hosts of 2 ranks 1.5 with contiguous ranks and 3 with cyclic ones, at 2 of 4 1.75 and 7,
    at 4 of 2 1.17 and 2.33.
    """
    hierarchical = hierarchical_bytes_per_host(1.0, hosts)
    return flat_bytes_per_host(1.0, ranks, leaving_edges=leaving_edges) / hierarchical if hierarchical else 1.0


def tcp_wire_bytes(payload_bytes: float, *, mtu_bytes: int = 1500) -> float:
    """Bytes that a link's counters show for a payload sent over TCP in full packets of IPv4 on Ethernet.

    Of the MTU, 20 bytes are the IP header (RFC 791) and 32 the TCP header with timestamps (RFC 9293, RFC 7323); 14
    bytes of Ethernet header (IEEE 802.3) come on top. With an MTU of 1500 that is 1.046 bytes a byte. Acknowledgements
    of what is received are not included.
    """
    headers_bytes = 20 + 32
    if mtu_bytes <= headers_bytes:
        raise ValueError(f"mtu_bytes must exceed the {headers_bytes} bytes of headers, got {mtu_bytes}")
    return payload_bytes * (mtu_bytes + 14) / (mtu_bytes - headers_bytes)


def transfer_time_s(size_bytes: float, rate_bytes_per_s: float, *, latency_s: float = 0.0, messages: int = 1) -> float:
    """Seconds a link takes for a number of messages one after the other: messages * latency + size / rate.

    The alpha-beta model: Hockney, "The communication challenge for MPP", Parallel Computing 1994.
    """
    _check_rate(rate_bytes_per_s)
    return messages * latency_s + size_bytes / rate_bytes_per_s


def ring_all_reduce_time_s(size_bytes: float, ranks: int, rate_bytes_per_s: float, *, latency_s: float = 0.0) -> float:
    """Seconds of a ring all-reduce over links that are alike: 2(n-1) latency + 2M(n-1)/n / rate.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005 (adding up
    is not counted). The rate is what a link carries in one direction; it carries as much in the other meanwhile. 140 GB
    over 100 Gbit/s, which are 12.5 GB/s, take 22.4 s as n grows. Figures of 11.2 s count the reduce-scatter only
    (:func:`ring_reduce_scatter_time_s`), or both directions of the link together as its rate.
    """
    sent_bytes = ring_all_reduce_bytes(size_bytes, ranks)
    return transfer_time_s(sent_bytes, rate_bytes_per_s, latency_s=latency_s, messages=2 * (ranks - 1))


def ring_reduce_scatter_time_s(
    size_bytes: float, ranks: int, rate_bytes_per_s: float, *, latency_s: float = 0.0
) -> float:
    """Seconds of a ring reduce-scatter or all-gather: (n-1) latency + M(n-1)/n / rate.

    Half of :func:`ring_all_reduce_time_s`, of the same source: gradients go one way only. For 140 GB over 100 Gbit/s
    11.2 s as n grows.
    """
    return ring_all_reduce_time_s(size_bytes, ranks, rate_bytes_per_s, latency_s=latency_s) / 2


def amdahl_speedup(parallel_fraction: float, workers: float) -> float:
    """Speed-up by n workers of work of which the fraction p is spread over them: 1 / (1 - p + p/n).

    Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", AFIPS 1967.
    With p = 0.9, 128 workers are 9.3 times as fast as one, and no number is more than 10 times
    (:func:`amdahl_limit`).

    Args:
        parallel_fraction: p, between 0 and 1.
        workers: n; as a factor of speed it need not be whole, and it may be infinite.
    """
    if not 0 <= parallel_fraction <= 1:
        raise ValueError(f"parallel_fraction is between 0 and 1, got {parallel_fraction}")
    if workers <= 0:
        raise ValueError(f"workers must be positive, got {workers}")
    return 1 / (1 - parallel_fraction + parallel_fraction / workers)


def amdahl_limit(parallel_fraction: float) -> float:
    """Speed-up that no number of workers exceeds: 1 / (1 - p); infinite for p = 1.

    Of :func:`amdahl_speedup`. It is also what doing without a share p of a step gives at most.
    """
    return math.inf if parallel_fraction == 1 else amdahl_speedup(parallel_fraction, math.inf)


def zero_state_bytes(
    values: float,
    ranks: int,
    *,
    stage: int,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes of parameters, gradients and optimizer state on each of N ranks for a model of Psi values.

    With p, g and K bytes a value: (p + g + K) Psi at stage 0, (p + g + K/N) Psi at stage 1, (p + (g + K)/N) Psi at
    stage 2, (p + g + K) Psi / N at stage 3. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
    parameter models", SC 2020 (figure 1): at stage 1 and 2 the parameters are whole also between steps. For
    7.5 billion values on 64 ranks, with the defaults: 120, 31.4, 16.6 and 1.9 GB.

    Args:
        values: Psi.
        ranks: N, over which states are sharded.
        stage: 0 (nothing is sharded) to 3.
        parameter_bytes: p, of the values that compute uses.
        gradient_bytes: g.
        optimizer_bytes: K; the default is Adam's two moments and a master copy of the parameter, all in fp32.
    """
    _check_count("ranks", ranks)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is 0, 1, 2 or 3, got {stage}")
    held = [parameter_bytes, gradient_bytes, optimizer_bytes]
    return values * (sum(held[: 3 - stage]) + sum(held[3 - stage :]) / ranks)


def secondary_shard_bytes(values: float, ranks_per_host: int, *, parameter_bytes: float = 2) -> float:
    """Bytes that a second copy of Psi parameters, sharded over the ranks of each host, takes on a rank: p Psi / r.

    It comes on top of :func:`zero_state_bytes`: the hierarchical partition (hpZ) of Wang et al., "ZeRO++: Extremely
    efficient collective communication for giant model training", 2023 (arXiv 2306.10209).
    """
    _check_count("ranks_per_host", ranks_per_host)
    return values * parameter_bytes / ranks_per_host


def transformer_layer_activation_bytes(batch: int, sequence: int, width: int, heads: int) -> float:
    """Bytes that one layer of a 16-bit transformer keeps from forward to backward: sbh(34 + 5as/h).

    The term in s squared are the attention scores, their dropout and its mask; flash attention keeps none of it.
    Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023 (equation 1).

    Args:
        batch: b, sequences.
        sequence: s, tokens.
        width: h.
        heads: a.
    """
    return sequence * batch * width * (34 + 5 * heads * sequence / width)


def _check_count(what: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{what} must be at least 1, got {count}")


def _check_rate(rate_bytes_per_s: float) -> None:
    if rate_bytes_per_s <= 0:
        raise ValueError(f"rate_bytes_per_s must be positive, got {rate_bytes_per_s}")


def pipeline_bubble(stages: int, micro_batches: int, *, virtual_stages: int = 1) -> float:
    """Share of a step that each rank of a pipeline idles: (P-1) / (VM + P-1), all stages costing alike.

    For V = 1 that of GPipe (Huang et al., "GPipe", NeurIPS 2019) and 1F1B alike; with V stages a rank that of the
    interleaved schedule (Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021), which counts it over the ideal time instead of the whole. Schedules that split backward idle
    less. At P = 8, M = 4 idles 64 %, M = 28 idles 20 %.

    Args:
        stages: P, the ranks of the pipeline.
        micro_batches: M.
        virtual_stages: V, stages a rank.
    """
    for name, count in (("stages", stages), ("micro_batches", micro_batches), ("virtual_stages", virtual_stages)):
        _check_count(name, count)
    return (stages - 1) / (virtual_stages * micro_batches + stages - 1)


def failure_probability(rate_per_hour: float, units: int, hours: float) -> float:
    """How likely at least one of n units fails within t hours: 1 - (1 - p)^(n t).

    Units fail independently, and each hour alike: the reliability of a series system, e.g. Barlow and Proschan,
    "Mathematical theory of reliability", 1965. At p = 1e-4 a card and hour, 100 cards fail within a day with 21 %.

    Args:
        rate_per_hour: p, how likely one unit fails within an hour, between 0 and 1.
        units: n.
        hours: t.
    """
    _check_failures(rate_per_hour, units)
    if not hours >= 0:
        raise ValueError(f"hours must not be negative, got {hours}")
    if rate_per_hour == 1:
        return 1.0 if hours > 0 else 0.0
    return -math.expm1(units * hours * math.log1p(-rate_per_hour))  # keeps the digits of small probabilities


def time_between_failures_s(rate_per_hour: float, units: int) -> float:
    """Mean seconds between failures of n units: an hour / (n p).

    For failures that come at random and small p (:func:`failure_probability`); the M of :func:`daly_interval_s`. At
    p = 1e-4 a card and hour, 100 cards run for 100 hours on average.
    """
    _check_failures(rate_per_hour, units)
    return 3600 / (units * rate_per_hour) if rate_per_hour else math.inf


def _check_failures(rate_per_hour: float, units: int) -> None:
    if not 0 <= rate_per_hour <= 1:
        raise ValueError(f"rate_per_hour is between 0 and 1, got {rate_per_hour}")
    _check_count("units", units)


def young_interval_s(save_cost_s: float, time_between_failures_s: float) -> float:
    """Seconds of work between two checkpoints that lose the least time, to first order: sqrt(2 delta M).

    Young, "A first order approximation to the optimum checkpoint interval", CACM 1974. Good while a save takes much
    less time than passes between failures; see :func:`daly_interval_s`.

    Args:
        save_cost_s: delta, for which the work stands still.
        time_between_failures_s: M, the mean for the whole job: that of one host over the number of hosts.
    """
    _check_times(save_cost_s, time_between_failures_s)
    return math.sqrt(2 * save_cost_s * time_between_failures_s)


def daly_interval_s(save_cost_s: float, time_between_failures_s: float) -> float:
    """The same to higher order: sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 2M / 9) - delta; M if delta >= 2M.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006 (equation 37).
    """
    _check_times(save_cost_s, time_between_failures_s)
    ratio = save_cost_s / (2 * time_between_failures_s)
    if ratio >= 1:
        return time_between_failures_s
    young_s = young_interval_s(save_cost_s, time_between_failures_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_cost_s


def lost_time_share(
    interval_s: float, save_cost_s: float, time_between_failures_s: float, *, restart_s: float = 0.0
) -> float:
    """Expected share of a long job's time that is no progress: saves, work done again, and restarts.

    1 - tau / (M e^(R/M) (e^((tau + delta)/M) - 1)), for failures that come at random: the complete model of
    Daly 2006.

    Args:
        interval_s: tau, work between two checkpoints.
        save_cost_s: delta.
        time_between_failures_s: M.
        restart_s: R, from a failure to work again.
    """
    _check_times(save_cost_s, time_between_failures_s)
    if interval_s <= 0 or restart_s < 0:
        raise ValueError(f"interval_s must be positive and restart_s not negative, got {interval_s} and {restart_s}")
    mean_s = time_between_failures_s
    if (interval_s + save_cost_s + restart_s) / mean_s > 700:  # beyond the range of exp: no interval is ever finished
        return 1.0
    spent_s = mean_s * math.exp(restart_s / mean_s) * math.expm1((interval_s + save_cost_s) / mean_s)
    return 1 - interval_s / spent_s


def _check_times(save_cost_s: float, time_between_failures_s: float) -> None:
    if not (save_cost_s > 0 and time_between_failures_s > 0):  # nor NaN
        raise ValueError(
            f"save_cost_s and time_between_failures_s must be positive, got {save_cost_s} and {time_between_failures_s}"
        )
