"""What the verdict's benchmark counts, and what it calls right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.verdict.cases import SETS, make_case
from benchmarks.verdict.command import append_performed, missing, read_performed
from benchmarks.verdict.performing import Performed
from benchmarks.verdict.runs import Injected, Run
from benchmarks.verdict.scoring import judge, score, wilson
from benchmarks.verdict.truth import shares, why_not
from lightning_dist.monitor.verdict import Cause, Finding, Reason, Verdict


def finding(cause: Cause, *, share: float = 0.3, reason: Reason | None = None, ranks: tuple[int, ...] = ()) -> Finding:
    return Finding(cause, share, 0.9, "said", reason=reason, ranks=ranks)


def performed(without_s: dict[str, float | None], *, compute_s: float = 0.05, step_s: float = 0.1) -> Performed:
    return Performed(1, tuple(without_s), {}, step_s=step_s, compute_s=compute_s, without_s=without_s)


def test_a_torn_line_is_done_again_and_takes_no_other_with_it(tmp_path: Path) -> None:
    case_set = SETS["train"]
    path = tmp_path / "performed.jsonl"
    seeds = [case_set.first_seed + number for number in range(4)]
    cases = [Performed(seed, ("slow link",), {}, step_s=0.1) for seed in seeds]
    with path.open("a+") as file:
        append_performed(file, cases[0])
        append_performed(file, cases[1])
    path.write_bytes(path.read_bytes()[:-20])  # killed while it wrote
    assert read_performed(tmp_path) == cases[:1]
    assert missing(case_set, cases[:1]) == 1
    with path.open("a+") as file:
        append_performed(file, cases[2])
    assert read_performed(tmp_path) == [cases[0], cases[2]]
    assert missing(case_set, read_performed(tmp_path)) == 1
    with path.open("a+") as file:
        append_performed(file, cases[1])
    assert read_performed(tmp_path) == cases[:3]
    assert missing(case_set, cases[:3]) == 3


@pytest.mark.parametrize("name", list(SETS))
def test_a_case_is_drawn_from_its_seed_alone(name: str) -> None:
    cases = [make_case(SETS[name], number) for number in range(30)]
    assert cases == [make_case(SETS[name], number) for number in range(30)]
    assert len({case.run.compute_s for case in cases}) == 30
    assert {len(case.causes) for case in cases} == {SETS[name].causes}


def test_no_seed_is_in_two_sets() -> None:
    tried = [range(each.first_seed, each.first_seed + 2 * each.count) for each in SETS.values()]
    assert len({seed for seeds in tried for seed in seeds}) == sum(map(len, tried))


def test_a_case_without_its_cause_is_another_run() -> None:
    for name in ("train", "train2"):
        for number in range(44):
            case = make_case(SETS[name], number)
            for cause, without in case.without.items():
                assert without != case.run, cause
                assert (without is None) == (cause is Injected.BUBBLE)


def test_the_same_noise_with_and_without_a_cause() -> None:
    case = make_case(SETS["train"], list(Injected).index(Injected.SLOW_LINK))
    without = case.without[Injected.SLOW_LINK]
    assert isinstance(without, Run)
    assert (without.seed, without.compute_s, without.jitter) == (case.run.seed, case.run.compute_s, case.run.jitter)


def test_what_a_cause_costs_is_what_leaving_it_out_saves() -> None:
    assert shares(performed({"slow link": 0.075})) == {"slow link": pytest.approx(0.25)}
    assert shares(performed({"pipeline bubble": None})) == {"pipeline bubble": pytest.approx(0.5)}
    both = shares(performed({"pipeline bubble": None, "host work": 0.08}))
    assert both == {"pipeline bubble": pytest.approx(0.3), "host work": pytest.approx(0.2)}


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (performed({"slow link": 0.07}), None),
        (performed({"slow link": 0.086}), "slow link costs 14%"),
        (performed({}, compute_s=0.08), None),
        (performed({}, compute_s=0.06), "healthy, but only 60% compute"),
        (performed({"slow link": 0.07, "host work": 0.09}), "host work costs 10%"),
        (Performed(1, ("slow link",), {}, failure="hung"), "it failed"),
    ],
)
def test_which_runs_count(run: Performed, why: str | None) -> None:
    assert why_not(run) == why


@pytest.mark.parametrize(
    ("truth", "main", "is_right"),
    [
        ("slow link", finding(Cause.COMMUNICATION, reason=Reason.SLOW_LINK), True),
        ("slow link", finding(Cause.COMMUNICATION, reason=Reason.VOLUME), True),
        ("slow link", finding(Cause.COMMUNICATION, reason=Reason.NO_OVERLAP), False),
        ("slow rank", finding(Cause.STRAGGLER, ranks=(2,)), True),
        ("slow rank", finding(Cause.STRAGGLER, ranks=(1,)), False),
        ("slow rank", finding(Cause.STRAGGLER), False),
        ("n-fold reads", finding(Cause.DATA_PIPELINE), False),
        ("host work", None, False),
    ],
)
def test_a_cause_is_named_with_its_reason_and_its_rank(truth: str, main: Finding | None, *, is_right: bool) -> None:
    judged = judge(1, "ddp", {truth: 0.3}, 2, Verdict(main))
    assert judged.is_right is is_right


def test_two_causes_are_right_in_either_order_and_only_if_they_come_first() -> None:
    storage, rank, host = finding(Cause.DATA_PIPELINE), finding(Cause.STRAGGLER, ranks=(2,)), finding(Cause.HOST_BOUND)
    truth = {"slow storage": 0.3, "slow rank": 0.2}
    assert judge(1, "ddp", truth, 2, Verdict(storage, (rank,))).is_right
    assert judge(1, "ddp", truth, 2, Verdict(rank, (storage, host))).is_right
    assert not judge(1, "ddp", truth, 2, Verdict(storage, (host, rank))).is_right
    assert not judge(1, "ddp", truth, 2, Verdict(storage)).is_right


def test_an_alarm_is_a_cause_named_where_there_is_none() -> None:
    healthy = [
        judge(1, "ddp", {}, None, Verdict(finding(Cause.COMPUTE_BOUND))),
        judge(2, "ddp", {}, None, Verdict(None, no_verdict="too few steps")),
        judge(3, "ddp", {}, None, Verdict(finding(Cause.HOST_BOUND))),
    ]
    scored = score(healthy)
    assert (scored.runs, scored.right, scored.alarms) == (3, 1, 1)
    assert scored.confusion == {"healthy": {"compute_bound": 1, "no verdict": 1, "host_bound": 1}}


def test_the_interval_holds_the_share_and_narrows() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(95, 100)
    assert low == pytest.approx(0.888, abs=0.001)  # by hand: (0.95 + 0.0192 -+ 0.0463) / 1.0384
    assert high == pytest.approx(0.978, abs=0.001)
