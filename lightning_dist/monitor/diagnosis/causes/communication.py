"""Exposed communication, and what is behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_dist.monitor.diagnosis import already
from lightning_dist.monitor.diagnosis.causes import exposed, lossy_link
from lightning_dist.monitor.diagnosis.changes import Shift, shift_of
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import SHARDED_MODES, Evidence, Traffic
from lightning_dist.monitor.diagnosis.wording import figures, rate, seconds, size
from lightning_dist.monitor.record import Phase
from lightning_dist.monitor.verdict import Reason

# At 1 Gbit/s and 0.25 ms, or 10 Gbit/s and 25 us, a message of 32 KiB takes as long for its latency as for its bytes.
SMALL_BYTES = 32 * 1024
MANY_OPERATIONS = 8  # a step: fewer cannot be joined to much effect
HIDDEN = 0.2  # of what could be hidden; an overlap that works hides most of it
HIDEABLE = 0.5  # of the exposed time: that much compute must be there for overlap to matter
OF_NOMINAL = 0.25  # of a link's nominal rate: TCP alone costs 5 %, one stream and a slow core a half
# Share of the step from which on small messages count: backward has work with each of them, too.
SMALL_COUNTS_FROM = 0.08
SLOWER = 1.5  # times as long as before: a link has degraded
BUCKET_BYTES = 8 * 1024 * 1024  # with these the latency of a bucket is nothing, and the first one starts early
LARGE_BUCKET_MB, SMALL_BUCKET_MB = 25, 8  # likewise of DistributedDataParallel


@dataclass(frozen=True)
class _Behind:
    """What is behind it."""

    reason: Reason
    what: str
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
    directness: float
    since_step: int | None = None


def claim(evidence: Evidence) -> Claim | None:
    """What communication costs beyond what compute hides, unless a lossy link is behind it."""
    if Phase.COMMUNICATION not in evidence.window.phases or lossy_link.is_lossy(evidence):
        return None
    cost_s = evidence.cost_s(Phase.COMMUNICATION)
    traffic = evidence.traffic
    behind = next(found for look in _LOOKS if (found := look(evidence, traffic)) is not None)
    return Claim(
        cost_s=cost_s,
        what=f"communication that nothing hides: {behind.what}",
        evidence=(*exposed.sentences(evidence), *behind.evidence),
        advice=behind.advice,
        directness=behind.directness,
        counts_from=SMALL_COUNTS_FROM if behind.reason is Reason.SMALL_BUCKETS else None,
        reason=behind.reason,
        since_step=behind.since_step,
    )


def _placement(evidence: Evidence, traffic: Traffic | None) -> _Behind | None:
    """A flat ring in the order of ranks crosses between hosts at each change of host. NCCL orders its rings itself."""
    cost = evidence.placement
    if cost is None or cost.ratio <= 1 or evidence.on_gpus or not _is_flat(evidence):
        return None
    return _Behind(
        Reason.PLACEMENT,
        "ranks that follow each other sit on different hosts",
        (
            f"{cost.host_edges} connections of the ring of ranks leave a host, where {cost.best_host_edges} would do: "
            f"{cost.ratio:.3g} times the bytes cross its link.",
        ),
        (
            "Number ranks host by host: in SLURM --distribution=block, else NODE_RANK and LOCAL_RANK in that order.",
            f"Or use communication to which the order is nothing: {exposed.hierarchical(evidence)}.",
        ),
        0.9,
    )


def _small_buckets(evidence: Evidence, traffic: Traffic | None) -> _Behind | None:
    """Many small messages cost their latency."""
    each = traffic.bytes_per_operation if traffic is not None else None
    if traffic is None or each is None or each >= SMALL_BYTES or traffic.operations < MANY_OPERATIONS:
        return None
    return _Behind(
        Reason.SMALL_BUCKETS,
        "it goes in many small messages, which cost their latency",
        (
            f"An operation carries {size(each)} on average and takes at least "
            f"{seconds(traffic.total_s / traffic.operations)}.",
        ),
        (
            _larger_buckets(evidence),
            f"If the model is that small: fewer synchronisations, {evidence.more_accumulation}.",
        ),
        0.85,
    )


def _no_overlap(evidence: Evidence, traffic: Traffic | None) -> _Behind | None:
    """Compute that could hide communication hides none."""
    if traffic is None or traffic.total_s <= 0:
        return None
    hideable_s = _hideable_s(evidence)
    exposed_s = float(evidence.cost_s(Phase.COMMUNICATION).mean())
    if hideable_s < HIDEABLE * exposed_s or traffic.overlapped_s > HIDDEN * min(hideable_s, traffic.total_s):
        return None
    return _Behind(
        Reason.NO_OVERLAP,
        "nothing is sent while backward computes",
        (f"Compute of {seconds(hideable_s)} could hide it, and hides {seconds(traffic.overlapped_s)}.",),
        (
            f"Let gradients travel during backward, in buckets: {_smaller_buckets(evidence)}; no all-reduce by hand "
            "after backward.",
            "If one bucket holds the whole model, as a small model does, a smaller bucket starts earlier.",
        ),
        0.85,
    )


def _slow_link(evidence: Evidence, traffic: Traffic | None) -> _Behind | None:
    """A link that carries less than it should, or than before."""
    if not evidence.has_several_hosts:
        return None
    lines = []
    shift = _degraded(evidence)
    since = None
    if shift is not None:
        since = evidence.window.steps[shift.index]
        lines.append(f"Since step {since} it takes {seconds(shift.after)} a step instead of {seconds(shift.before)}.")
    nominal, carried = evidence.numbers("link_bytes_per_s"), evidence.link_rate
    if nominal and carried is not None and carried < OF_NOMINAL * min(nominal):
        lines.append(f"The busiest host sends {rate(carried)} meanwhile, over a link of {rate(min(nominal))}.")
    if not lines:
        return None
    return _Behind(
        Reason.SLOW_LINK,
        "a link between hosts is slow",
        tuple(lines),
        (
            "Measure each link: hierdist topology --probe on all ranks; look for a host whose link is slower, a port "
            "that fell back to a lower speed, other traffic.",
            _interface(evidence),
            *exposed.fewer_bytes(evidence),
        ),
        0.9 if len(lines) > 1 or shift is not None else 0.8,
        since,
    )


def _volume(evidence: Evidence, traffic: Traffic | None) -> _Behind:
    """What remains."""
    if not evidence.has_several_hosts:
        return _Behind(
            Reason.VOLUME,
            "more bytes than ranks of a host exchange in the time of a step",
            (),
            (f"Synchronise less often: {evidence.more_accumulation}.", *_fewer_threads(evidence)),
            0.75,
        )
    carried = evidence.link_rate
    known = bool(evidence.numbers("link_bytes_per_s")) and carried is not None
    lines = () if carried is None else (f"The busiest host sends {rate(carried)} meanwhile.",)
    doubt = () if known else ("What the link can do is not known, so it may as well be slow.",)
    return _Behind(
        Reason.VOLUME,
        "more bytes than the link carries in the time of a step",
        (*lines, *doubt),
        exposed.fewer_bytes(evidence),
        0.85 if known else 0.7,
    )


# In this order: facts first, then what is concluded; the last one always holds.
_LOOKS: tuple[Callable[[Evidence, Traffic | None], _Behind | None], ...] = (
    _placement,
    _small_buckets,
    _no_overlap,
    _slow_link,
    _volume,
)


def _larger_buckets(evidence: Evidence) -> str:
    now = evidence.option("sync.bucket_bytes" if evidence.is_ours else "ddp.bucket_cap_mb")
    enough = BUCKET_BYTES if evidence.is_ours else LARGE_BUCKET_MB
    if isinstance(now, int | float) and now >= enough:
        return "Buckets are large: look for the script's own, as self.log(..., sync_dist=True) in each step."
    how = f"sync.bucket_bytes={BUCKET_BYTES}" if evidence.is_ours else f"DDPStrategy(bucket_cap_mb={LARGE_BUCKET_MB})"
    return f"Larger buckets: {how}."


def _smaller_buckets(evidence: Evidence) -> str:
    """A quarter of now, if they are as small as is told to others."""
    if evidence.is_ours:
        now = evidence.whole_option("sync.bucket_bytes")
        return f"sync.bucket_bytes={BUCKET_BYTES if now is None or now > BUCKET_BYTES else now // 4}"
    cap = evidence.option("ddp.bucket_cap_mb")
    is_small = isinstance(cap, int | float) and 0 < cap <= SMALL_BUCKET_MB
    return f"DDPStrategy(bucket_cap_mb={figures(cap / 4) if is_small else SMALL_BUCKET_MB})"


def _interface(evidence: Evidence) -> str:
    named = sorted({str(name) for name in evidence.facts("interface")})
    if named:
        return (
            f"See whether {', '.join(named)} is the fastest interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME name it."
        )
    return "Name the right interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."


def _fewer_threads(evidence: Evidence) -> tuple[str, ...]:
    if evidence.on_gpus or already.has_enough_cores(evidence):
        return ()
    return ("Ranks that share cores hold each other up: fewer ranks, or OMP_NUM_THREADS so low that all fit.",)


def _is_flat(evidence: Evidence) -> bool:
    """Whether gradients go round one ring of all ranks."""
    return not evidence.is_ours or evidence.option("sync.algorithm") == "flat"


def _hideable_s(evidence: Evidence) -> float:
    """Compute during which something could be sent: gathers of sharded parameters go on during forward too."""
    phases = [Phase.BACKWARD]
    if evidence.option("parallel.mode") in SHARDED_MODES:
        phases.append(Phase.FORWARD)
    return float(evidence.cost_s(*phases).mean())


def _degraded(evidence: Evidence) -> Shift | None:
    shift = shift_of(evidence.cost_s(Phase.COMMUNICATION))
    return shift if shift is not None and shift.after > SLOWER * max(shift.before, 1e-9) else None
