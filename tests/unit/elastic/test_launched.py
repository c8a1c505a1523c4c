"""What a rank reads off its environment, and what it leaves in its agent's folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_dist import HierDistStrategy
from lightning_dist.capabilities import without_effect
from lightning_dist.config import ElasticConfig, ParallelConfig, RecomputeConfig, SyncConfig, TopologyConfig
from lightning_dist.elastic.agent_folder import OPTIONS_FILE, tell_options, told_options
from lightning_dist.elastic.launched import Launched, launched
from lightning_dist.errors import ConfigError, LaunchError, UnknownOptionError


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launched()),
        (
            {"HIERDIST_AGENT": "/a", "HIERDIST_RUN": "r", "HIERDIST_ROUND": "3", "GROUP_WORLD_SIZE": "2"},
            Launched(Path("/a"), "r", 3, 2),
        ),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}, Launched()),
        (
            {"TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_RESTART_COUNT": "2", "GROUP_WORLD_SIZE": "4"},
            Launched(None, "id", 3, None),
        ),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}, Launched(None, "17", 2)),
        (
            {"SLURM_JOB_ID": "17", "HIERDIST_RUN": "r", "HIERDIST_ROUND": "1", "TORCHELASTIC_RESTART_COUNT": "4"},
            Launched(None, "r", 1),
        ),
        ({"HIERDIST_RUN": "r", "HIERDIST_RECORD": "/records"}, Launched(None, "r", 1, None, "/records")),
    ],
)
def test_which_start_of_which_run_this_is(environ: dict[str, str], expected: Launched) -> None:
    found = launched(environ)
    assert found == expected
    assert found.is_restart == (expected.round > 1)


def test_a_round_that_is_no_number_is_refused() -> None:
    with pytest.raises(LaunchError, match="HIERDIST_ROUND='two'"):
        launched({"HIERDIST_ROUND": "two"})


def test_the_agent_reads_the_options_that_a_rank_wrote(tmp_path: Path) -> None:
    assert told_options(tmp_path) is None
    for config in (ElasticConfig(mode="degrade", rejoin_s=4.0), ElasticConfig(mode="restart", regrow=False)):
        tell_options(tmp_path, config)
        assert told_options(tmp_path) == config
    assert os.listdir(tmp_path) == [OPTIONS_FILE]
    assert stat.S_IMODE((tmp_path / OPTIONS_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "error"),
    [("{", ConfigError), ("[1]", ConfigError), ('{"modus": "off"}', UnknownOptionError)],
)
def test_what_are_no_options_is_refused(tmp_path: Path, text: str, error: type[Exception]) -> None:
    (tmp_path / OPTIONS_FILE).write_text(text)
    with pytest.raises(error):
        told_options(tmp_path)


def test_under_an_agent_the_number_of_hosts_is_that_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    strategy = HierDistStrategy()
    strategy.num_nodes = 4
    assert strategy.num_nodes == 4  # torchrun's; a Trainer that asks for others is refused at launch
    monkeypatch.setenv("HIERDIST_AGENT", "/nowhere")
    strategy = HierDistStrategy(elastic="degrade")
    strategy.num_nodes = 4
    assert strategy.num_nodes == 3
    assert strategy.elastic_config == ElasticConfig(mode="degrade")


def test_elastic_without_an_agent_is_said() -> None:
    configs = (ParallelConfig(), RecomputeConfig(), ElasticConfig(mode="degrade"))
    where = {"num_hosts": 2, "device_type": "cpu"}
    (said,) = without_effect(SyncConfig(), TopologyConfig(), *configs, **where)  # type: ignore[arg-type]
    assert "elastic=degrade has no effect" in said
    assert "hierdist launch" in said
    assert without_effect(SyncConfig(), TopologyConfig(), *configs, **where, has_agent=True) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "device_type", "has_agent", "reason"),
    [
        ("ddp", "cpu", True, None),
        ("zero3", "cpu", True, None),
        ("ddp", "cpu", False, "without an agent"),
        ("ddp", "cuda", True, "parallel=ddp on cuda"),
        ("pipeline", "cpu", True, "parallel=pipeline on cpu"),
    ],
)
def test_processes_that_cannot_stay_are_named(mode: str, device_type: str, has_agent: bool, reason: str | None) -> None:
    configs = (ParallelConfig(mode=mode), RecomputeConfig(), ElasticConfig(in_place=True))
    said = without_effect(
        SyncConfig(), TopologyConfig(), *configs, num_hosts=2, device_type=device_type, has_agent=has_agent
    )
    if reason is None:
        assert said == ()
    else:
        assert said[0].startswith("elastic.in_place=true has no effect")
        assert reason in said[0]


def test_all_starts_of_a_run_write_into_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> str:
        with initialize_config_module(version_base="1.3", config_module="lightning_dist.conf"):
            config = compose("train", overrides=["name=t"], return_hydra_config=True)
        return str(OmegaConf.to_container(config.hydra.run, resolve=True)["dir"])  # type: ignore[index,call-overload]

    assert folder().startswith("outputs/t/2")  # a date
    monkeypatch.setenv("HIERDIST_RUN", "brave-ant")
    assert folder() == "outputs/t/brave-ant"
