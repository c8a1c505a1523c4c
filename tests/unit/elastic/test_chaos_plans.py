"""Plans of faults: read, refused in words, drawn; all pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_dist.elastic.chaos.agenda import Agenda
from lightning_dist.elastic.chaos.kinds import KINDS
from lightning_dist.elastic.chaos.plan import Fault, Plan, kinds_of, make_fault, parse, read_plan
from lightning_dist.elastic.chaos.random_plans import random_plan
from lightning_dist.errors import ConfigError

PLAN = """
faults:
  - {kind: kill, rank: 3, step: 12}
  - {kind: stop, rank: 1, step: 20, seconds: 3}
  - {kind: cut, rank: 0, step: 5, host: b, interface: eth0, direction: out}
"""


def test_a_plan_is_read_with_defaults() -> None:
    kill, stop, cut = parse(PLAN).faults
    assert (kill.kind, kill.rank, kill.step, dict(kill.options)) == ("kill", 3, 12, {})
    assert dict(stop.options) == {"seconds": 3}
    assert dict(cut.options) == {"host": "b", "interface": "eth0", "direction": "out", "seconds": None}
    assert str(cut) == "cut host=b interface=eth0 direction=out"


def test_a_plan_survives_both_notations() -> None:
    plan = parse(PLAN)
    assert parse(plan.to_json()) == plan
    assert parse(plan.to_yaml()) == plan


def test_faults_of_a_rank_come_by_step_and_then_as_written() -> None:
    kills = [Fault("kill", 0, 7), Fault("exit", 1, 2), Fault("torn", 0, 3), Fault("kill", 0, 3)]
    assert [number for number, _ in Plan(tuple(kills)).of_rank(0)] == [2, 3, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- kind", "a mapping with one key, faults"),
        ("faults: {}", "a mapping with one key, faults"),
        ("faults: [kill]", r"faults\[0\] must be a mapping"),
        ("faults: [{rank: 0, step: 1}]", r"faults\[0\] has no kind"),
        ("faults: [{kind: kill, rank: 0}]", "has no step"),
        ("faults: [{kind: kil, rank: 0, step: 1}]", "Did you mean kill"),
        ("faults: [{kind: kill, rank: -1, step: 1}]", "rank=-1"),
        ("faults: [{kind: kill, rank: 0, step: soon}]", "step is a number"),
        ("faults: [{kind: stop, rank: 0, step: 1, second: 3}]", "Did you mean seconds"),
        ("faults: [{kind: stop, rank: 0, step: 1, seconds: 0}]", "seconds=0 seconds"),
        ("faults: [{kind: cut, rank: 0, step: 1}]", "has no interface; write it, e.g. interface: eth0"),
        ("faults: [{kind: cut, rank: 0, step: 1, interface: e, direction: up}]", "allowed: both, in, out"),
        ("faults: [{kind: cut, rank: 0, step: 1, interface: 5}]", "must be text"),
        ("faults: [{kind: exit, rank: 0, step: 1, code: 256}]", "between 1 and 255"),
        ("faults: [{kind: kill, rank: 0, step: 1, where: x}]", "where is unknown"),
        ("faults: [", "is no YAML"),
    ],
)
def test_mistakes_are_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        read_plan(tmp_path / "none.yaml")


def drawn(seed: int = 7, **options: Any) -> Plan:
    return random_plan(seed, **{"num_faults": 40, "num_ranks": 4, "num_steps": 100, "interface": "eth0", **options})


def test_the_same_seed_draws_the_same_plan() -> None:
    assert drawn() == drawn()
    assert drawn() != drawn(8)
    few = drawn(1, num_faults=3, kinds=["kill", "exit", "stop"], num_steps=20)
    assert [(fault.kind, fault.rank, fault.step) for fault in few.faults] == GOLDEN


GOLDEN = [("kill", 3, 3), ("exit", 1, 14), ("stop", 1, 17)]


def test_drawn_plans_hit_every_kind_and_each_step_once() -> None:
    plan = drawn()
    assert kinds_of(plan.faults) == list(KINDS)
    steps = [fault.step for fault in plan.faults]
    assert steps == sorted(set(steps))
    assert 1 <= steps[0] <= steps[-1] < 100
    assert {fault.rank for fault in plan.faults} == {0, 1, 2, 3}
    assert parse(plan.to_yaml()) == plan


def test_what_lasts_in_a_drawn_plan_ends() -> None:
    assert all(fault.options["seconds"] > 0 for fault in drawn().faults if "seconds" in fault.options)


def test_links_are_left_alone_without_an_interface() -> None:
    assert not {"cut", "slow_link"} & set(kinds_of(drawn(interface=None).faults))
    with pytest.raises(ConfigError, match="name its interface"):
        drawn(interface=None, kinds=["cut"])


def test_draws_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="40 faults need at least 41 steps, got 40"):
        drawn(num_steps=40)
    with pytest.raises(ConfigError, match="Did you mean kill"):
        drawn(kinds=["kil"])


def test_a_fault_can_be_made_in_python() -> None:
    assert make_fault("exit", rank=0, step=1).options == {"code": 1}


def test_the_agenda_acts_in_order_and_once() -> None:
    agenda, done = Agenda(), list[str]()
    agenda.at(2.0, lambda: done.append("b"))
    agenda.at(1.0, lambda: (done.append("a"), agenda.at(1.0, lambda: done.append("then")))[0])
    agenda.at(2.0, lambda: done.append("c"))
    agenda.run(0.5)
    assert done == []
    agenda.run(2.0)
    agenda.run(3.0)
    assert done == ["a", "then", "b", "c"]


def test_the_page_names_all_kinds_and_their_options_and_its_plan_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "chaos.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert set(rows) == set(KINDS)
    for name, kind in KINDS.items():
        assert all(f"`{option}`" in rows[name] for option in kind.options if option != "host"), name
        has_host = "host" in kind.options
        assert has_host == (f"`{name}`" not in page.partition("for all but")[2].partition("`hierdist chaos")[0]), name
    assert len(parse(page.partition("```yaml")[2].partition("```")[0]).faults) == 3
