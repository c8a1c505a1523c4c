"""Whatever a record holds, the verdict is one, and it does not depend on what it should not depend on."""

from __future__ import annotations

import dataclasses
import math
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.monitor.diagnosis import diagnose
from lightning_dist.monitor.record import (
    Phase,
    RankHeader,
    RankRecord,
    RunFacts,
    RunRecord,
    Sample,
    StepRecord,
    Traffic,
)
from lightning_dist.monitor.verdict import Verdict
from tests.support.monitored import Model, Slow

NUMBERS = st.one_of(st.floats(0, 1), st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e-300, 1e300, 1e5]))
METRICS = st.sampled_from(
    ["gpu_utilisation", "read_bytes", "network_sent", "tcp_retransmits", "tcp_sent_segments", "heartbeat_timeouts", "x"]
)
FACTS = st.dictionaries(
    st.sampled_from(
        [
            "is_sharded",
            "sampler",
            "dataset_length",
            "samples_per_epoch",
            "link_bytes_per_s",
            "workers",
            "data_parallel_rank",
        ]
    ),
    st.one_of(st.none(), st.booleans(), st.integers(-5, 10**9), st.text(max_size=3), NUMBERS),
)
OPTIONS = st.dictionaries(
    st.sampled_from(
        ["parallel.mode", "parallel.pipeline.size", "parallel.pipeline.micro_batches", "sync.algorithm", "data.workers"]
    ),
    st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.sampled_from(["pipeline", "tensor", "ddp", "flat", ""])),
)


@st.composite
def traffics(draw: st.DrawFn) -> Traffic | None:
    if draw(st.booleans()):
        return None
    size = draw(st.one_of(st.none(), st.integers(-1, 10**12)))
    return Traffic(draw(NUMBERS), draw(NUMBERS), size, draw(st.integers(-1, 1000)))


@st.composite
def records(draw: st.DrawFn) -> RunRecord:
    """Anything that the types allow."""
    world = draw(st.integers(1, 4))
    ranks: dict[int, RankRecord] = {}
    template = draw(
        st.lists(
            st.tuples(
                NUMBERS, st.dictionaries(st.sampled_from(list(Phase)), st.one_of(st.none(), NUMBERS)), traffics()
            ),
            min_size=1,
            max_size=4,
        )
    )
    for rank in range(world):
        if draw(st.integers(0, 5)) == 0:
            continue
        count, offset = draw(st.integers(0, 30)), draw(st.integers(0, 3))
        steps = tuple(
            StepRecord(number, rank, number, *template[(number * offset) % len(template)])
            for number in range(offset, offset + count)
        )
        samples = tuple(
            Sample(draw(METRICS), draw(st.integers(0, 30)), 0, draw(NUMBERS)) for _ in range(draw(st.integers(0, 4)))
        )
        host = draw(st.sampled_from(["a", "b", ""]))
        header = RankHeader(rank, rank, host, draw(st.sampled_from(["cpu", "cuda:0", ""])), 1, 0, 0, {}, draw(FACTS))
        ranks[rank] = RankRecord(header, steps, samples)
    facts = RunFacts("", "", draw(st.integers(0, 5)), draw(st.sampled_from(["", "hierdist", "DDP"])), draw(OPTIONS))
    return RunRecord(facts, ranks)


@given(records())
@settings(max_examples=80, deadline=None)
def test_any_record_has_a_verdict_or_a_reason(record: RunRecord) -> None:
    verdict = diagnose(record)
    assert (verdict.main is None) == (verdict.no_verdict is not None)
    for finding in (*([verdict.main] if verdict.main else []), *verdict.others):
        assert 0 <= finding.share <= 1
        assert 0 <= finding.confidence <= 1
        assert finding.speedup_at_most >= 1
        assert set(finding.ranks) <= set(record.ranks)
        assert finding.summary
    if verdict.main is not None:
        assert all(finding.share <= verdict.main.share for finding in verdict.others)


MODELS = st.builds(
    Model,
    steps=st.integers(20, 60),
    seed=st.integers(0, 1000),
    noise=st.floats(0, 0.3),
    times_s=st.fixed_dictionaries({Phase.DATA_WAIT: st.floats(0, 0.05), Phase.OPTIMIZER: st.floats(0, 0.03)}),
    communication_s=st.floats(0, 0.05),
    slow=st.tuples(st.builds(Slow, st.just((2,)), st.floats(0, 0.05))),
    checkpoint_every=st.sampled_from([0, 7]),
    checkpoint_s=st.floats(0, 0.5),
)


@given(MODELS, st.permutations(range(4)))
@settings(max_examples=15, deadline=None)
def test_order_in_which_ranks_are_read_does_not_matter(model: Model, order: list[int]) -> None:
    record = model.record()
    shuffled = RunRecord(record.facts, {rank: record.ranks[rank] for rank in order})
    assert diagnose(shuffled) == diagnose(record)


@given(MODELS, st.lists(st.integers(-(10**15), 10**15), min_size=4, max_size=4))
@settings(max_examples=15, deadline=None)
def test_clocks_need_not_agree(model: Model, offsets: list[int]) -> None:
    record = model.record()
    assert diagnose(_shifted(record, offsets)) == diagnose(record)


@given(MODELS, st.sampled_from([1 / 64, 8.0, 128.0]))
@settings(max_examples=15, deadline=None)
def test_shares_do_not_depend_on_the_speed_of_the_machine(model: Model, factor: float) -> None:
    """A machine that is slower in all is slow for the same cause; what is judged in seconds is left out."""
    record = model.record()
    slower, found = diagnose(_scaled(record, factor)), diagnose(record)
    assert _causes(slower) == _causes(found)
    if found.main is not None and slower.main is not None:
        assert math.isclose(found.main.share, slower.main.share, rel_tol=1e-6)


def test_ten_thousand_ranks() -> None:
    """A few seconds: the verdict of a large run is read at a desk."""
    few = Model(hosts=[f"host{rank // 8}" for rank in range(8)], steps=30, slow=(Slow((5,), 0.02),)).record()
    ranks = {}
    for rank in range(10_000):
        like = few.ranks[rank if rank < 8 else rank % 5]  # of those, none is slow
        header = dataclasses.replace(like.header, rank=rank, local_rank=rank % 8, host=f"host{rank // 8}")
        ranks[rank] = dataclasses.replace(like, header=header, samples=())
    record = RunRecord(dataclasses.replace(few.facts, world_size=10_000), ranks)
    started_s = time.process_time()
    verdict = diagnose(record)
    assert time.process_time() - started_s < 60
    assert verdict.main is not None
    assert verdict.main.ranks == (5,)


def _shifted(record: RunRecord, offsets: list[int]) -> RunRecord:
    ranks = {}
    for (rank, each), offset in zip(record.ranks.items(), offsets, strict=True):
        steps = tuple(dataclasses.replace(step, start_ns=step.start_ns + offset) for step in each.steps)
        header = dataclasses.replace(each.header, started_ns=each.header.started_ns + offset)
        samples = tuple(sample._replace(wall_ns=sample.wall_ns + offset) for sample in each.samples)
        ranks[rank] = RankRecord(header, steps, samples)
    return RunRecord(record.facts, ranks)


def _scaled(record: RunRecord, factor: float) -> RunRecord:
    ranks = {}
    for rank, each in record.ranks.items():
        steps = []
        for step in each.steps:
            traffic = step.communication
            assert traffic is not None
            scaled = dataclasses.replace(
                traffic, total_s=traffic.total_s * factor, exposed_s=traffic.exposed_s * factor
            )
            phases = {phase: None if value is None else value * factor for phase, value in step.phases.items()}
            steps.append(
                dataclasses.replace(step, duration_s=step.duration_s * factor, phases=phases, communication=scaled)
            )
        samples = tuple(
            sample._replace(value=sample.value / factor) if sample.metric == "read_bytes" else sample
            for sample in each.samples
        )
        ranks[rank] = RankRecord(each.header, tuple(steps), samples)
    return RunRecord(record.facts, ranks)


def _causes(verdict: Verdict) -> list[object]:
    found = [verdict.main, *verdict.others] if verdict.main is not None else []
    return [(finding.cause, finding.reason) for finding in found if finding is not None]
