"""What is run, in which order, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.errors import ConfigError, RecordError
from lightning_dist.experiment.arms import Experiment, RunName, parse_arm, schedule
from lightning_dist.experiment.store import Outcome, Store, default_folder

A, B = ("sync=hierarchical",), ("sync=bf16", "optimizer.lr=0.1")
COMMAND = ("python", "train.py", "model=mlp")


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{"a": A, "b": B, "command": COMMAND, "steps": 20, **changes})


def test_runs_alternate_their_order() -> None:
    names = [str(name) for name in schedule(range(3))]
    assert names == ["a-seed0", "b-seed0", "b-seed1", "a-seed1", "a-seed2", "b-seed2"]


def test_a_run_is_the_command_with_its_overrides_last() -> None:
    command = experiment().command_of(RunName("b", 3), folder="out/b's")
    assert command == [
        *COMMAND,
        *B,
        "seed=3",
        "trainer.max_steps=20",
        "hydra.run.dir='out/b\\'s'",
    ]


def test_overrides_go_where_the_command_has_room_for_them() -> None:
    given = experiment(command=("sh", "launch.sh", "{}", "--", "end"), steps=None, seed_option="train.seed")
    assert given.command_of(RunName("a", 0), folder="o") == [
        *("sh", "launch.sh", *A, "train.seed=0", "hydra.run.dir='o'", "--", "end")
    ]


def test_an_arm_is_one_text_or_several() -> None:
    assert parse_arm("--a", ["sync=int8 +x.y=2", "'data.path=a b'", "~monitor"]) == (
        *("sync=int8", "+x.y=2", "data.path=a b", "~monitor"),
    )
    assert parse_arm("--a", [""]) == ()


@pytest.mark.parametrize("text", ["sync", "--sync=int8", "=3", "'open"])
def test_what_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--b"):
        parse_arm("--b", [text])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": A}, "are the same"),
        ({"command": ()}, "no command"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"b": ("seed=3",)}, "--b sets seed, which --seeds sets"),
        ({"a": ("trainer.max_steps=3",)}, "--a sets trainer.max_steps, which --steps sets"),
        ({"b": ("sync=bf16", "sync=flat")}, "sets sync twice"),
        ({"command": (*COMMAND, "sync=flat")}, "sync is set by the command and by --a"),
        ({"command": (*COMMAND, "seed=3")}, "the command sets seed"),
        ({"command": (*COMMAND, "hydra.run.dir=x")}, "the command sets hydra.run.dir"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(**changes)


def test_the_same_experiment_has_the_same_folder() -> None:
    assert default_folder(experiment()) == default_folder(experiment())
    assert default_folder(experiment(steps=21)) != default_folder(experiment())
    assert default_folder(experiment()).name.startswith("sync=hierarchical--sync=bf16")


def test_a_store_keeps_how_runs_ended(tmp_path: Path) -> None:
    name, outcome = RunName("a", 0), Outcome(False, "it ended with status 1", 2.5, ("ValueError: no",))
    with Store(tmp_path / "ab", experiment()) as store:
        store.begin(name)
        assert store.outcome(name) is None
        store.end(name, outcome)
    with Store(tmp_path / "ab", experiment()) as store:
        assert store.outcome(name) == outcome
        store.begin(name)
        assert store.outcome(name) is None, "what an earlier attempt left is gone"


def test_a_torn_outcome_is_none(tmp_path: Path) -> None:
    with Store(tmp_path / "ab", experiment()) as store:
        store.begin(RunName("a", 0))
        (store.run_folder(RunName("a", 0)) / "outcome.json").write_text('{"is_good": tr')
        assert store.outcome(RunName("a", 0)) is None


def test_a_folder_belongs_to_one_experiment_and_one_command(tmp_path: Path) -> None:
    with Store(tmp_path / "ab", experiment()), pytest.raises(ConfigError, match="another hierdist ab works"):
        Store(tmp_path / "ab", experiment())
    with pytest.raises(ConfigError, match="steps was 20, and is now 30"):
        Store(tmp_path / "ab", experiment(steps=30))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"holds something else \(thesis.tex\)"):
        Store(tmp_path / "mine", experiment())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_damaged_experiment_is_said(tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text("{")
    with pytest.raises(RecordError, match="cannot be read"):
        Store(tmp_path, experiment())
    (tmp_path / "experiment.json").write_text(json.dumps([1]))
    with pytest.raises(RecordError, match="cannot be read"):
        Store(tmp_path, experiment())
