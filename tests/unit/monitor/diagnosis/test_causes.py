"""Each cause is named, with its share, and not taken for another that looks alike."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from lightning_dist.config.pipeline import PIPELINE_SCHEDULES, PipelineConfig
from lightning_dist.monitor.diagnosis import diagnose
from lightning_dist.monitor.diagnosis.rules import RULES
from lightning_dist.monitor.record import Phase
from lightning_dist.monitor.verdict import Cause, Finding, Reason
from tests.support.monitored import CYCLIC, MB, Model, Slow

PIPELINE = {"parallel.mode": "pipeline", "parallel.pipeline.size": 4, "parallel.pipeline.micro_batches": 4}
TEN_GBIT = 10e9 / 8

# What was put in, and the cause, the reason behind it, and the share that it costs.
CAUSES: dict[str, tuple[Model, Cause, Reason | None, float]] = {
    "slow loader": (Model(times_s={Phase.DATA_WAIT: 0.03}), Cause.DATA_PIPELINE, None, 0.44),
    "slow move to the device": (Model(times_s={Phase.HOST_TO_DEVICE: 0.02}), Cause.DATA_PIPELINE, None, 0.35),
    "all bytes read by each": (
        Model(times_s={Phase.DATA_WAIT: 0.03}, read_factor=4.2),
        Cause.IO_AMPLIFICATION,
        None,
        0.44,
    ),
    "no sampler that deals": (
        Model(times_s={Phase.DATA_WAIT: 0.03}, facts={"is_sharded": False, "sampler": "RandomSampler"}),
        Cause.IO_AMPLIFICATION,
        None,
        0.44,
    ),
    "epoch as long as the set": (
        Model(times_s={Phase.DATA_WAIT: 0.03}, facts={"dataset_length": 800, "samples_per_epoch": 800}),
        Cause.IO_AMPLIFICATION,
        None,
        0.44,
    ),
    "an eighth of the link's rate": (
        Model(communication_s=0.06, facts={"link_bytes_per_s": TEN_GBIT}, sent_bytes_per_s=100 * MB),
        Cause.COMMUNICATION,
        Reason.SLOW_LINK,
        0.58,
    ),
    "a link that degrades": (Model(slower_from=50, slower=8.0), Cause.COMMUNICATION, Reason.SLOW_LINK, 0.46),
    "more bytes than a full link carries": (
        Model(communication_s=0.06, facts={"link_bytes_per_s": TEN_GBIT}, sent_bytes_per_s=650 * MB),
        Cause.COMMUNICATION,
        Reason.VOLUME,
        0.58,
    ),
    "ranks dealt in turn": (
        Model(hosts=CYCLIC, communication_s=0.06),
        Cause.COMMUNICATION,
        Reason.PLACEMENT,
        0.58,
    ),
    "sent after backward": (
        Model(communication_s=0.02, hidden_s=0.0),
        Cause.COMMUNICATION,
        Reason.NO_OVERLAP,
        0.34,
    ),
    "200 messages of 10 kB": (
        Model(communication_s=0.04, operations=200, size_bytes=2 * MB),
        Cause.COMMUNICATION,
        Reason.SMALL_BUCKETS,
        0.47,
    ),
    "segments lost": (Model(communication_s=0.04, resent={"b": 0.08}), Cause.LOSSY_LINK, None, 0.47),
    "a slow rank": (Model(slow=(Slow((2,), 0.02),)), Cause.STRAGGLER, None, 0.32),
    "a slow host": (Model(slow=(Slow((2, 3), 0.02),)), Cause.STRAGGLER, None, 0.32),
    "a rank with slow storage": (
        Model(slow=(Slow((1,), 0.02, Phase.DATA_WAIT),)),
        Cause.STRAGGLER,
        None,
        0.32,
    ),
    "few micro-batches": (
        Model(idle_s=0.028, options=PIPELINE, strategy="hierdist pipeline"),
        Cause.PIPELINE_BUBBLE,
        None,
        0.41,
    ),
    "checkpoints by rank 0": (Model(checkpoint_every=20, checkpoint_s=0.5), Cause.CHECKPOINT, None, 0.36),
    "slow optimizer": (Model(times_s={Phase.OPTIMIZER: 0.03}), Cause.HOST_BOUND, None, 0.48),
    "slow callback": (Model(times_s={Phase.OTHER: 0.03}), Cause.HOST_BOUND, None, 0.48),
    "slow logger of rank 0": (Model(slow=(Slow((0,), 0.03, Phase.LOGGING),)), Cause.HOST_BOUND, None, 0.47),
    "nothing": (Model(), Cause.COMPUTE_BOUND, None, 0.85),
}


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_cause_is_named_with_its_share(name: str, noise: float) -> None:
    model, cause, reason, share = CAUSES[name]
    main = _main(dataclasses.replace(model, noise=noise))
    assert (main.cause, main.reason) == (cause, reason)
    # The share is that of the model without noise; noise makes the slowest rank slower, so it costs up to 6 % more.
    assert main.share == pytest.approx(share, abs=0.06)
    assert main.confidence >= 0.65
    assert main.evidence
    assert main.advice


@pytest.mark.parametrize("name", CAUSES)
def test_nothing_else_is_named(name: str) -> None:
    model, _, _, _ = CAUSES[name]
    assert diagnose(model.record()).others == ()


def test_every_cause_has_one_rule_with_its_reason() -> None:
    causes = [rule.cause for rule in RULES]
    assert sorted([*causes, Cause.COMPUTE_BOUND]) == sorted(Cause)
    assert all(0 < rule.threshold < 0.5 and rule.because for rule in RULES)


def test_one_host_has_no_link() -> None:
    main = _main(Model(hosts="aaaa", slower_from=50, slower=8.0))
    assert (main.cause, main.reason) == (Cause.COMMUNICATION, Reason.VOLUME)
    assert "ranks of a host" in main.summary


def test_a_full_link_is_not_a_lossy_one() -> None:
    """Streams that fill a queue make it drop: that is mentioned, and is no cause."""
    main = _main(Model(communication_s=0.06, resent={"a": 0.03}))
    assert main.cause is Cause.COMMUNICATION
    assert any("3.0% of its TCP segments" in line for line in main.evidence)


def test_many_segments_sent_again_are_counted_without_an_exponent() -> None:
    main = _main(Model(communication_s=0.06, resent={"a": 0.2}))
    assert any("20% of its TCP segments again, 2000 a second" in line for line in main.evidence)


def test_causes_have_distinct_advice() -> None:
    advice = {(main.cause, main.reason): main.advice for main in map(_main, (case[0] for case in CAUSES.values()))}
    assert len(set(advice.values())) == len(advice)


def test_speedup_is_amdahls() -> None:
    main = _main(Model(times_s={Phase.DATA_WAIT: 0.04}))
    assert main.speedup_at_most == pytest.approx(1 / (1 - main.share))


def test_compute_bound_says_what_all_the_rest_is_worth() -> None:
    main = _main(Model())
    assert main.speedup_at_most == pytest.approx(1 / main.share)


def test_compute_bound_lists_what_costs_a_little() -> None:
    main = _main(Model(checkpoint_every=20, checkpoint_s=0.06, communication_s=0.01))
    assert main.cause is Cause.COMPUTE_BOUND
    assert main.evidence[-1].startswith("Besides: communication 9%")
    assert "checkpoint 6% (counts from 10% on)" in main.evidence[-1]


TWO_CAUSES: dict[str, tuple[Model, Cause, Cause]] = {
    "loader and checkpoints": (
        Model(times_s={Phase.DATA_WAIT: 0.03}, checkpoint_every=20, checkpoint_s=0.3),
        Cause.DATA_PIPELINE,
        Cause.CHECKPOINT,
    ),
    "link and slow rank": (
        Model(communication_s=0.05, slow=(Slow((3,), 0.02),)),
        Cause.COMMUNICATION,
        Cause.STRAGGLER,
    ),
    "slow rank and loader": (
        Model(slow=(Slow((1,), 0.03, Phase.DATA_WAIT),), times_s={Phase.DATA_WAIT: 0.015}),
        Cause.STRAGGLER,
        Cause.DATA_PIPELINE,
    ),
    "bubble and slow stage": (
        Model(idle_s=0.03, slow=(Slow((2,), 0.015),), options=PIPELINE, strategy="hierdist pipeline"),
        Cause.PIPELINE_BUBBLE,
        Cause.STRAGGLER,
    ),
    "loss and loader": (
        Model(communication_s=0.06, resent={"a": 0.08}, times_s={Phase.DATA_WAIT: 0.02}),
        Cause.LOSSY_LINK,
        Cause.DATA_PIPELINE,
    ),
    "optimizer and loader": (
        Model(times_s={Phase.OPTIMIZER: 0.05, Phase.DATA_WAIT: 0.02}),
        Cause.HOST_BOUND,
        Cause.DATA_PIPELINE,
    ),
}


@pytest.mark.parametrize("name", TWO_CAUSES)
def test_second_cause_is_named_too(name: str) -> None:
    model, first, second = TWO_CAUSES[name]
    verdict = diagnose(model.record())
    assert verdict.main is not None
    assert [verdict.main.cause, *(finding.cause for finding in verdict.others)] == [first, second]


def test_who_and_since_when() -> None:
    main = _main(Model(slow=(Slow((2,), 0.04, since=60),)))
    assert main.cause is Cause.STRAGGLER
    assert main.ranks == (2,)
    assert main.since_step == 60


def test_checkpoints_are_summed_although_they_are_rare() -> None:
    """4 of 90 steps stand still: the median step knows nothing of them."""
    verdict = diagnose(Model(checkpoint_every=20, checkpoint_s=0.5).record())
    assert verdict.main is not None
    assert verdict.step_s == pytest.approx(0.04, abs=0.004)
    assert verdict.main.share == pytest.approx(0.36, abs=0.02)
    assert "4 of 90 steps" in verdict.main.evidence[0]


def test_a_look_whether_one_is_due_is_no_checkpoint() -> None:
    """Half a millisecond in each step, and one second in every twentieth."""
    main = _main(Model(times_s={Phase.CHECKPOINT: 0.0005}, checkpoint_every=20, checkpoint_s=1.0))
    assert main.cause is Cause.CHECKPOINT
    assert main.evidence[0] == "4 of 90 steps stand still for a checkpoint, 1 s each."


def test_a_slow_rank_is_no_communication() -> None:
    """Three of four ranks spend most of the step in communication, waiting for the fourth."""
    record = Model(slow=(Slow((2,), 0.06),)).record()
    waits = [step.phases[Phase.COMMUNICATION] or 0.0 for rank in (0, 1, 3) for step in record.ranks[rank].steps]
    assert min(waits) > 0.05
    verdict = diagnose(record)
    assert verdict.main is not None
    assert verdict.main.cause is Cause.STRAGGLER
    assert verdict.others == ()


def test_order_of_ranks_is_nothing_to_hierarchical_communication() -> None:
    main = _main(
        Model(hosts=CYCLIC, communication_s=0.06, strategy="hierdist ddp", options={"sync.algorithm": "hierarchical"})
    )
    assert main.reason is Reason.VOLUME


def test_ranks_that_share_a_model_read_the_same() -> None:
    options = {"parallel.mode": "tensor", "parallel.tensor.size": 4}
    main = _main(Model(times_s={Phase.DATA_WAIT: 0.03}, read_factor=4.0, options=options, strategy="hierdist tensor"))
    assert main.cause is Cause.DATA_PIPELINE


def test_one_rank_alone_can_wait_for_data() -> None:
    main = _main(Model(hosts=("a",), times_s={Phase.DATA_WAIT: 0.03}, unavailable={Phase.COMMUNICATION: "one rank"}))
    assert main.cause is Cause.DATA_PIPELINE


def test_a_busy_gpu_speaks_against_waiting() -> None:
    waiting = Model(times_s={Phase.DATA_WAIT: 0.03})
    doubted = dataclasses.replace(waiting, metrics={"gpu_utilisation": 0.99})
    assert _main(doubted).confidence < _main(waiting).confidence
    saw_tooth = dataclasses.replace(waiting, metrics={"gpu_utilisation": (0.95, 0.9, 0.1, 0.1)})
    assert "saw-tooth" in _main(saw_tooth).evidence[0]
    assert _main(saw_tooth).confidence == _main(waiting).confidence


def test_a_rank_that_stood_still_is_named_by_its_late_heartbeats() -> None:
    model = Model(slow=(Slow((1,), 1.5, since=97),), metrics={"heartbeat_timeouts": (0.0, 0.0, 0.0, 2.0)})
    main = _main(model)
    assert main.cause is Cause.STRAGGLER
    assert main.ranks == (1,)
    assert main.since_step == 97


def _main(model: Model) -> Finding:
    verdict = diagnose(model.record())
    assert verdict.main is not None, verdict.no_verdict
    return verdict.main


_SAVING = Model(checkpoint_every=20, checkpoint_s=0.5)


@pytest.mark.parametrize(
    ("model", "before", "done", "advice"),
    [
        (Model(times_s={Phase.OPTIMIZER: 0.03}), {}, {"parallel.mode": "zero2"}, "parallel=zero"),
        (_SAVING, {"checkpoint.mode": "async_sharded"}, {"checkpoint.snapshot": "overlapped"}, "overlapped"),
        (_SAVING, {}, {"checkpoint.mode": "async_sharded"}, "checkpoint=async_sharded"),
        (Model(idle_s=0.028), PIPELINE, {"parallel.pipeline.schedule": "zbv"}, "=zbv"),
        (Model(communication_s=0.04, resent={"b": 0.08}), {}, {"sync.codec": "bf16"}, "sync=bf16"),
        (Model(communication_s=0.06), {}, {"sync.codec": "bf16"}, "sync=bf16"),
    ],
)
def test_what_is_done_already_is_no_advice(
    model: Model, before: dict[str, Any], done: dict[str, Any], advice: str
) -> None:
    without = _main(dataclasses.replace(model, options=before))
    assert advice in " ".join(without.advice)
    having = _main(dataclasses.replace(model, options={**before, **done}))
    assert having.cause is without.cause
    assert advice not in " ".join(having.advice)


_SLOW_LOADER = Model(times_s={Phase.DATA_WAIT: 0.03})
_SLOW_MOVE = Model(times_s={Phase.HOST_TO_DEVICE: 0.02})
_EACH_READS = Model(times_s={Phase.DATA_WAIT: 0.03}, read_factor=4.2)
_SMALL = Model(communication_s=0.04, operations=200, size_bytes=2 * MB)
_UNHIDDEN = Model(communication_s=0.02, hidden_s=0.0)
_FULL = Model(communication_s=0.06)
_RARE = Model(times_s={Phase.FORWARD: 300.0}, checkpoint_every=60, checkpoint_s=4000.0)
_OURS = {"strategy": "hierdist ddp"}
_SAVES = {"options": {"checkpoint.mode": "async_sharded"}}
_OF_OURS = {"options": {"sync.algorithm": "hierarchical"}, **_OURS}
_BALANCED = {"options": {**PIPELINE, "parallel.pipeline.balance": "time"}}

# A run, what it has besides, and what it then is not told any more, and is told instead.
DONE: dict[str, tuple[Model, dict[str, Any], tuple[str, str]]] = {
    "ddp's buckets": (_SMALL, {"options": {"ddp.bucket_cap_mb": 25}}, ("bucket_cap_mb=25", "sync_dist")),
    "our buckets": (_SMALL, {**_OURS, "options": {"sync.bucket_bytes": 2**23}}, ("Larger", "sync_dist")),
    "ddp's small ones": (_UNHIDDEN, {"options": {"ddp.bucket_cap_mb": 8}}, ("bucket_cap_mb=8)", "bucket_cap_mb=2)")),
    "our small ones": (
        _UNHIDDEN,
        {**_OURS, "options": {"sync.bucket_bytes": 2**23}},
        ("bucket_cap_mb", "sync.bucket_bytes=2097152"),
    ),
    "a named interface": (
        Model(slower_from=50, slower=8.0),
        {"facts": {"interface": "eth7"}},
        ("Name the right", "whether eth7 is"),
    ),
    "a hook of 16 bits": (_FULL, {"options": {"ddp.comm_hook": "<function bf16_compress_hook>"}}, ("=bf16", "hierd")),
    "a model of 16 bits": (_FULL, {"options": {"trainer.precision": "bf16-true"}}, ("sync=bf16", "hierdist")),
    "our strategy": (_FULL, _OF_OURS, ('Trainer(strategy="hierdist")', "sync=bf16")),
    "cores for all threads": (
        Model(hosts="aaaa", communication_s=0.06),
        {"facts": {"threads": 2, "cpu_cores": 8}},
        ("OMP_NUM_THREADS", "Synchronise"),
    ),
    "a loader of shards": (_SLOW_LOADER, {"facts": {"loader": "ShardedLoader"}}, ("data=sharded", "fetch further")),
    "readers that are processes": (
        _SLOW_LOADER,
        {"options": {"data.readers": "processes"}},
        ("data.readers=processes", "If decoding is: decode once"),
    ),
    "pinned batches": (_SLOW_MOVE, {"facts": {"pin_memory": True}}, ("pin_memory=", "pinned already")),
    "pinned by our loader": (_SLOW_MOVE, {"options": {"data.pin_memory": True}}, ("pin_memory=", "pinned already")),
    "pinned on a slow rank": (
        Model(slow=(Slow((1,), 0.02, Phase.HOST_TO_DEVICE),)),
        {"facts": {"pin_memory": True}},
        ("pin_memory=", "PCIe"),
    ),
    "shards read by each": (_EACH_READS, {"facts": {"loader": "ShardedLoader"}}, ("data=sharded", "data.cache_limit")),
    "a sampler that deals": (
        _EACH_READS,
        {"options": {"trainer.use_distributed_sampler": True}},
        ("DistributedSampler", "IterableDataset that skips"),
    ),
    "rare logging": (
        Model(times_s={Phase.LOGGING: 0.03}),
        {"options": {"trainer.log_every_n_steps": 50}},
        ("=50)", "log_every_n_steps=200)"),
    ),
    "no bar": (
        Model(times_s={Phase.OTHER: 0.03}),
        {"options": {"trainer.enable_progress_bar": False}},
        ("progress bar", ".item()"),
    ),
    "a fused optimizer": (
        Model(times_s={Phase.OPTIMIZER: 0.03}),
        {"options": {"optimizer.fused": True}},
        ("fused", "zero1"),
    ),
    "Lightning's shards": (
        Model(times_s={Phase.OPTIMIZER: 0.03}),
        {"strategy": "ModelParallelStrategy"},
        ("zero1", "fused"),
    ),
    "a compiled model": (Model(), {"options": {"model.is_compiled": True}}, ("torch.compile", "larger batches")),
    "a callback that saves": (_SAVING, _SAVES, ("Write while training", "AsyncShardedCheckpoint(checkpoint=")),
    "saves as often as loses least": (
        _SAVING,
        {"options": {"checkpoint.every": "auto"}},
        ("Save less often", "mtbf_h"),
    ),
    "stages balanced by time": (
        Model(slow=(Slow((2,), 0.03),), idle_s=0.001, options=PIPELINE, strategy="hierdist pipeline"),
        _BALANCED,
        ("balance=time", "parallel.pipeline.split"),
    ),
}


@pytest.mark.parametrize("name", DONE)
def test_nobody_is_told_what_is_so_already(name: str) -> None:
    model, having, (gone, instead) = DONE[name]
    before, after = _main(model), _main(dataclasses.replace(model, **having))
    assert after.cause is before.cause
    assert gone in " ".join(before.advice)
    assert gone not in " ".join(after.advice)
    assert instead in " ".join(after.advice)


def test_checkpoints_are_not_to_be_rarer_than_loses_least() -> None:
    assert "Save less often" in " ".join(_main(_SAVING).advice)
    main = _main(_RARE)
    assert main.cause is Cause.CHECKPOINT
    assert "Save less often" not in " ".join(main.advice)
    assert "as rare as loses the least time" in " ".join(main.advice)


@pytest.mark.parametrize(("now", "told"), [(4, "(sync.max_in_flight=2)"), (1, None), (None, None)])
def test_fewer_streams_are_for_who_has_several(now: int | None, told: str | None) -> None:
    lossy = Model(communication_s=0.04, resent={"b": 0.08}, options={"sync.max_in_flight": now})
    advice = " ".join(_main(lossy).advice)
    assert ("max_in_flight" in advice) is (told is not None)
    assert told is None or told in advice


def test_a_quiet_host_hides_no_lossy_link() -> None:
    """It sends two segments a second, and one of them again: the other's hundreds are what costs time."""
    record = Model(communication_s=0.04, resent={"b": 0.08}).record()
    quiet = {"tcp_sent_segments": 1.0, "tcp_retransmits": 0.5}
    of_a = record.ranks[0]
    samples = tuple(each._replace(value=quiet.get(each.metric, each.value)) for each in of_a.samples)
    ranks = {**record.ranks, 0: dataclasses.replace(of_a, samples=samples)}
    main = diagnose(dataclasses.replace(record, ranks=ranks)).main
    assert main is not None
    assert (main.cause, main.ranks) == (Cause.LOSSY_LINK, (2, 3))


@pytest.mark.parametrize(
    ("schedule", "virtual", "now", "then"),
    [
        ("1f1b", None, "idle 43%", "idles 16%"),
        ("interleaved_1f1b", 4, "idle 16%", "idles 4.5%"),
        ("interleaved_1f1b", None, "idle 27%", "idles 9%"),  # it has two stages a rank then
        ("zbv", 2, "idle at most 27%", "idles 9%"),
    ],
)
def test_bubble_of_the_advice_is_that_of_the_schedule(schedule: str, virtual: int | None, now: str, then: str) -> None:
    """Several stages a rank idle less, with more micro-batches too."""
    options = {"parallel.pipeline.schedule": schedule, "parallel.pipeline.virtual_stages": virtual}
    main = _main(Model(idle_s=0.028, options={**PIPELINE, **options}))
    assert f"4 stages with 4 micro-batches {now} of a step" in " ".join(main.evidence)
    assert f"micro_batches=16 {then}" in main.advice[0]


@pytest.mark.parametrize(
    ("samples", "now", "then"),
    [
        (4, "4 micro-batches idle 43%", "micro_batches=16 with batches of 16 samples (now 4) idles 16%"),
        (6, "6 micro-batches idle 33%", "micro_batches=24 with batches of 24 samples (now 6) idles 11%"),
        (32, "8 micro-batches idle 27%", "Cut batches finer: parallel.pipeline.micro_batches=32 idles 9%"),
    ],
)
def test_a_batch_has_no_more_micro_batches_than_samples(samples: int, now: str, then: str) -> None:
    """The option says how many at most."""
    options = {**PIPELINE, "parallel.pipeline.micro_batches": 8, "parallel.pipeline.schedule": "1f1b"}
    main = _main(Model(idle_s=0.028, options=options, facts={"batch_size": samples}))
    assert now in " ".join(main.evidence)
    assert then in main.advice[0]


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_the_micro_batches_of_the_advice_can_be_set(schedule: str) -> None:
    """Interleaved ones take no 16 on three ranks."""
    options = {**PIPELINE, "parallel.pipeline.size": 3, "parallel.pipeline.schedule": schedule}
    said = re.search(r"micro_batches=(\d+)", _main(Model(hosts=["a"] * 3, idle_s=0.028, options=options)).advice[0])
    assert said is not None
    assert PipelineConfig(size=3, schedule=schedule, micro_batches=int(said[1])).micro_batches == 18


def test_one_pipeline_has_nobody_to_share_its_optimizer_with() -> None:
    model = Model(times_s={Phase.OPTIMIZER: 0.03}, options=PIPELINE, strategy="hierdist pipeline")
    assert "zero1" not in " ".join(_main(model).advice)
    of_two = {**PIPELINE, "parallel.pipeline.size": 2}
    assert "zero1" in " ".join(_main(dataclasses.replace(model, options=of_two)).advice)


@pytest.mark.parametrize(("workers", "more"), [(0, 4), (2, 4), (4, 8), (8, 16)])
def test_more_workers_are_more_than_now(workers: int, more: int) -> None:
    main = _main(Model(times_s={Phase.DATA_WAIT: 0.03}, facts={"workers": workers}))
    assert f"data.workers={more} (now {workers}), or num_workers={more}" in main.advice[0]


@pytest.mark.parametrize(
    "model",
    [
        Model(communication_s=0.06),
        Model(hosts="aaaa", communication_s=0.06),
        Model(communication_s=0.06, operations=2000),
        Model(times_s={Phase.OPTIMIZER: 0.03}),
    ],
)
def test_more_accumulation_is_more_than_now(model: Model) -> None:
    main = _main(dataclasses.replace(model, options={"trainer.accumulate_grad_batches": 8}))
    assert "accumulate_grad_batches=32)" in " ".join(main.advice)


def test_half_precision_is_no_advice_to_who_has_it() -> None:
    assert "precision=bf16-mixed" in _main(Model()).advice[0]
    having = _main(Model(options={"trainer.precision": "bf16-mixed"}))
    assert having.cause is Cause.COMPUTE_BOUND
    assert "precision" not in having.advice[0]
