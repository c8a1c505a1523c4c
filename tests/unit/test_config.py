"""The options: validation, presets, YAML beside dataclass, and errors that say what would have worked."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from lightning_dist import config, config_store, run_config
from lightning_dist.config import ParallelConfig, RecomputeConfig, SyncConfig, TopologyConfig
from lightning_dist.errors import CombinationError, ConfigError, UnknownOptionError
from lightning_dist.parallel.tensor.styles import READY_PLANS

CONF = Path(__file__).resolve().parents[2] / "conf"
OPTIONS = [(path.parent.name, path.stem) for path in sorted(CONF.rglob("*.yaml")) if path.parent != CONF]
NEEDS = {  # what an option cannot do without
    ("model", "mlp"): ["data=synthetic"],
    ("recompute", "budget"): ["recompute.budget=8GB"],
    ("topology", "three_tier"): ["topology.switches={rack1: [a, b], rack2: [c, d]}"],
}
PRESETS: dict[str, tuple[type, dict[str, Any]]] = {
    "parallel": (ParallelConfig, config.PARALLEL_PRESETS),
    "sync": (SyncConfig, config.SYNC_PRESETS),
    "topology": (TopologyConfig, config.TOPOLOGY_PRESETS),
    "recompute": (RecomputeConfig, config.RECOMPUTE_PRESETS),
    "monitor": (config.MonitorConfig, config.MONITOR_PRESETS),
}


@pytest.fixture(autouse=True, scope="module")
def hydra() -> Iterator[None]:
    config_store.register()
    with initialize_config_module("lightning_dist.conf", version_base="1.3"):
        yield


@functools.cache
def _run(*overrides: str) -> run_config.RunConfig:
    """What is composed; a fifth of a second, hence once for each."""
    return config_store.to_run_config(compose("train", overrides=list(overrides)))


# -- composition


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_makes_a_run(group: str, option: str) -> None:
    run = _run(f"{group}={option}", *NEEDS.get((group, option), []))
    assert isinstance(run, run_config.RunConfig)


def test_defaults_of_yaml_and_dataclass_are_the_same() -> None:
    assert _run() == run_config.RunConfig()


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group, (_, presets) in PRESETS.items() for name in presets if (group, name) not in NEEDS],
)
def test_preset_and_yaml_are_the_same(group: str, name: str) -> None:
    assert getattr(_run(f"{group}={name}"), group) == PRESETS[group][1][name]


@pytest.mark.parametrize("group", PRESETS)
def test_presets_are_the_options_of_the_group(group: str) -> None:
    names = {option for of, option in OPTIONS if of == group}
    assert set(PRESETS[group][1]) == names


@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("data", run_config.DATA_KINDS),
        ("optimizer", run_config.OPTIMIZER_KINDS),
        ("checkpoint", run_config.RunCheckpointConfig.MODES),
        ("topology", config.TIER_CHOICES),
        ("parallel", config.PARALLEL_MODES),
        ("recompute", config.RECOMPUTE_MODES),
    ],
)
def test_each_kind_has_its_file(group: str, options: tuple[str, ...]) -> None:
    assert {option for of, option in OPTIONS if of == group} == set(options)


def test_composed_groups_are_what_the_strategy_takes() -> None:
    composed = compose("train", overrides=["sync=bf16", "sync.max_in_flight=3", "topology.probe.enabled=true"])
    sync = config.resolve("sync", composed.sync, SyncConfig, config.SYNC_PRESETS)
    assert sync == SyncConfig(codec="bf16", max_in_flight=3)
    topology = config.resolve("topology", composed.topology, TopologyConfig, config.TOPOLOGY_PRESETS)
    assert topology.probe == config.ProbeConfig(enabled=True)


def test_mappings_and_typed_values_can_be_overridden() -> None:
    run = _run("topology.hosts={a: [0, 1], b: [2]}", "sync.timeout_s=5", "trainer.devices=[0, 1]")
    assert run.topology.hosts == {"a": [0, 1], "b": [2]}
    assert run.sync.timeout_s == 5.0
    assert run.trainer.devices == [0, 1]


@pytest.mark.parametrize("prompt", ["a=b", "50% of #1", "two words", "caf\N{LATIN SMALL LETTER E WITH ACUTE}, {x}"])
def test_awkward_values_survive(prompt: str) -> None:
    assert _run(f"sample_prompt='{prompt}'").sample_prompt == prompt


def test_overlay_wins_over_groups_and_loses_to_the_command_line() -> None:
    run = _run("experiment=quick", "trainer.max_steps=7")
    assert (run.model.n_embd, run.trainer.max_steps, run.trainer.log_every_n_steps) == (64, 7, 5)


def test_register_again_changes_nothing() -> None:
    config_store.register()
    config_store.register()
    assert _run() == run_config.RunConfig()


def test_schemas_are_no_options_of_the_groups() -> None:
    with pytest.raises(MissingConfigException) as caught:
        compose("train", overrides=["model=gpt"])
    assert caught.value.options == ["gpt-small", "gpt-tiny", "mlp"]


# -- YAML files


def _files_with_all_options() -> list[Path]:
    files = [path for path in sorted(CONF.rglob("*.yaml")) if path.parent != CONF and path.parent.name != "experiment"]
    return [path for path in files if "Options and units" not in path.read_text()]


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_file_says_what_it_is_for(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# ")


@pytest.mark.parametrize("path", _files_with_all_options(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_option_has_a_comment(path: Path) -> None:
    body = re.sub(r"(?ms)^defaults:\n(  .*\n)+", "", path.read_text())
    assert [line for line in body.splitlines() if re.match(r"\s*\w+: \S", line) and " # " not in line] == []


@pytest.mark.parametrize(
    "group", ["parallel", "sync", "topology", "data", "model", "optimizer", "trainer", "checkpoint", "monitor"]
)
def test_one_file_of_each_group_shows_every_option(group: str) -> None:
    shown = [_keys(OmegaConf.load(path)) for path in _files_with_all_options() if path.parent.name == group]
    schemas = [schema for name, schema in config_store.SCHEMAS.items() if name.split("_")[0] == group]
    for schema in schemas:
        assert {*_fields(schema)} in shown


def _keys(node: Any, prefix: str = "") -> set[str]:
    assert isinstance(node, DictConfig)
    found = set()
    for key in node:
        if key != "defaults":
            found |= _keys(node[key], f"{prefix}{key}.") if isinstance(node[key], DictConfig) else {f"{prefix}{key}"}
    return found


def _fields(schema: type, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(schema):
        nested = field.default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            yield from _fields(nested, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


# -- errors


def test_wrong_option_lists_the_right_ones() -> None:
    with pytest.raises(
        MissingConfigException,
        match=r"Available options in 'sync':\n\tauto\n\tbf16\n\tflat\n\thierarchical\n\tint8\n\tlocal_sgd\n\t"
        r"onebit\n\tparameter_server\n\tpowersgd\n\ttopk",
    ):
        compose("train", overrides=["sync=hierarchic"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sync.codec=fp4", "allowed: same, bf16, int8, onebit, topk"),
        ("sync.algorithm=ring", "allowed: flat, hierarchical, powersgd, local_sgd"),
        ("sync.chunk_bytes=1", "must be at least 4096 bytes"),
        ("topology.tiers=two_tiers", "Did you mean two_tier"),
        ("topology.tiers=three_tier", "needs topology.switches"),
        ("topology.probe.budget_s=60", "between 0.1 and 2 seconds"),
        ("parallel.mode=zero9", "allowed: ddp"),
        ("parallel.uneven_inputs=wait", "allowed: stop, error, off"),
        ("model.n_head=5", "closest that does is model.n_head=4"),
        ("model.dropout=1.0", "at least 0 and below 1"),
        ("data.kind=synthetic", "allowed: sharded"),
        ("data.batch_size=0", "data.batch_size=0 samples: must be at least 1"),
        ("data.seq_len=1000", "longer than the model's context"),
        ("data.val_fraction=0.9", "at most 0.5"),
        ("optimizer.schedule=linear", "allowed: cosine, constant"),
        ("optimizer.lr=-1", "at least 0"),
        ("trainer.accelerator=tpu", "allowed: auto, cpu, gpu, cuda"),
        ("trainer.precision=fp8", "allowed: 32-true, 16-mixed, bf16-mixed, bf16-true"),
        ("trainer.devices=0", r"a list of device indices such as \[0, 1\], or auto"),
        ("trainer.devices=[]", "or auto"),
        ("parallel.tensor.size=0", "parallel.tensor.size=0 ranks: must be at least 1"),
        ("trainer.max_steps=-1", "never end"),
        ("trainer.val_check_interval=0.5", "needs trainer.check_val_every_n_epoch=1"),
        ("trainer.limit_val_batches=2.5", "write 3 for so many batches"),
        ("checkpoint.mode=half", "allowed: full, sharded, async_sharded, off"),
        ("checkpoint.save_top_k=3", "needs checkpoint.monitor"),
        ("checkpoint.every=never", "allowed: steps, auto"),
        ("monitor.spans_every=0", "at least 1"),
        ("monitor.interval_s=0", "monitor.interval_s=0 seconds"),
        ("monitor.heartbeat_timeout_s=2", "three beats"),
        ("monitor.prometheus_port=70000", "between 1 and 65535"),
        ("monitor.prometheus_host=0.0.0.0", "give a port"),
        ("checkpoint.every=auto", "needs checkpoint.mtbf_h"),
        ("checkpoint.mtbf_h=200", "write checkpoint.every=auto, or leave it out"),
        ("checkpoint.mtbf_h=0", "checkpoint.mtbf_h=0: must be at least 0.001"),
        ("checkpoint.snapshot=overlapped", "write checkpoint=async_sharded, or snapshot=at_once"),
        ("checkpoint.snapshot=later", "allowed: at_once, overlapped"),
        ("checkpoint.replica=memory", "write checkpoint=async_sharded or sharded, or replica=off"),
        ("checkpoint.replica=disk", "allowed: off, memory, buddy"),
        ("checkpoint.replica_limit=8GBit", "is no size"),
        ("checkpoint.replica_limit=12", "at least"),
        ("checkpoint.replica_rate=1KB", "bytes a second"),
        ("model=mlp", "write data=synthetic"),
        ("sample_temperature=-1", "at least 0"),
        ("+nonsense=1", "no option"),
    ],
)
def test_wrong_value_says_what_is_right(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _run(override)


@pytest.mark.parametrize("override", ["sync.timeout_s=abc", "sync.timeout_s=true", "model.n_layer=1.5", "sync.foo=1"])
def test_value_of_the_wrong_type_does_not_compose(override: str) -> None:
    with pytest.raises(ConfigCompositionException):
        compose("train", overrides=[override])


def test_combinations_are_refused() -> None:
    auto = ("checkpoint.every=auto", "checkpoint.mtbf_h=200")
    assert _run("checkpoint=async_sharded", *auto).checkpoint.mtbf_h == 200
    with pytest.raises(CombinationError, match=r"write checkpoint\.mode=async_sharded"):
        _run("checkpoint=full", *auto)
    with pytest.raises(CombinationError, match=r"write checkpoint\.monitor=null"):
        _run("checkpoint=sharded", "checkpoint.monitor=val_loss", *auto)
    with pytest.raises(CombinationError, match=r"write optimizer\.schedule=constant"):
        _run("trainer.max_steps=-1", "trainer.max_epochs=1")
    with pytest.raises(CombinationError, match=r"needs optimizer\.momentum above 0"):
        _run("optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tensor.size=2"], r"parallel\.mode=ddp with parallel\.tensor\.size=2: .* write parallel=tensor"),
        (["parallel=tensor", "parallel.tensor.size=1"], "splits nothing; write parallel=ddp"),
        (
            ["parallel=zero3", "parallel.tensor.size=2", "parallel.secondary_shard=host"],
            "write parallel.secondary_shard=off, or parallel=hsdp",
        ),
        (["parallel=zero2", "parallel.tensor.size=2", "parallel.cpu_offload=true"], "write parallel.cpu_offload=false"),
    ],
)
def test_what_does_not_go_with_split_layers_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(CombinationError, match=message):
        _run(*overrides)


def test_plans_are_names_or_mappings() -> None:
    run = _run("parallel=tensor", "parallel.tensor.plan={*.up: column, *.qkv: 'fused_column:3', *.down: row}")
    assert run.parallel.tensor.plan == {"*.up": "column", "*.qkv": "fused_column:3", "*.down": "row"}
    assert set(config.TENSOR_PLANS) == {"auto", *READY_PLANS}
    for wrong in ("'bert'", "3", "{}"):
        with pytest.raises(ConfigError, match=r"auto, gpt, huggingface, mlp"):
            _run("parallel=tensor", f"parallel.tensor.plan={wrong}")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sync.chunk=1", "sync.chunk is unknown; the options of sync are: algorithm, codec"),
        ("+sync.chunk=1", "the options of sync are"),
        ("topology.probe.enable=1", "the options of topology.probe are: enabled, budget_s"),
        ("model.heads=1", "n_head.*n_hidden"),
        ("planner=full", "planner is unknown; the options of the run are: name, seed"),
        ("sync.timeout=1", "Did you mean timeout_s?"),
    ],
)
def test_unknown_names_on_the_command_line_are_listed(argument: str, message: str) -> None:
    with pytest.raises(UnknownOptionError, match=message):
        config_store.check_overrides(["-m", argument])


def test_known_names_on_the_command_line_pass() -> None:
    config_store.check_overrides(
        [
            "-m",
            "--config-dir=x=y",
            "experiment=quick",
            "hydra.run.dir=x",
            "hydra/launcher=basic",
            "sync@other.place=flat",
            "sync=flat,bf16",
            "~experiment",
            "trainer.max_steps=3",
            "+topology.hosts.a=[0]",
            "sample_prompt='a=b'",
        ]
    )


# -- without Hydra


def test_resolve_takes_names_mappings_and_configs() -> None:
    ready = SyncConfig(max_in_flight=4)
    assert config.resolve("sync", ready, SyncConfig, config.SYNC_PRESETS) is ready
    assert config.resolve("sync", "bf16", SyncConfig, config.SYNC_PRESETS).codec == "bf16"
    assert config.resolve("sync", {"max_in_flight": 4}, SyncConfig, config.SYNC_PRESETS) == ready


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("int9", UnknownOptionError, "sync='int9' is unknown; allowed: flat, hierarchical, bf16"),
        ({"buckets": 1}, UnknownOptionError, "bucket_bytes"),
        ({"timeout_s": "5"}, ConfigError, "a number of seconds, got '5'"),
        ({"timeout_s": True}, ConfigError, "a number of seconds"),
        (3, ConfigError, "must be one of flat, hierarchical, bf16"),
    ],
)
def test_resolve_refuses_the_rest(given: object, error: type[ConfigError], message: str) -> None:
    with pytest.raises(error, match=message):
        config.resolve("sync", given, SyncConfig, config.SYNC_PRESETS)


def test_nested_mappings_become_nested_configs() -> None:
    made = config.from_mapping("topology", {"probe": {"enabled": True}}, TopologyConfig)
    assert made.probe == config.ProbeConfig(enabled=True)
    with pytest.raises(UnknownOptionError, match=r"enabled, budget_s"):
        config.from_mapping("topology", {"probe": {"on": True}}, TopologyConfig)


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SyncConfig().algorithm = "flat"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sync.timeout_s=60s", r"sync.timeout_s=60s: must be a number of seconds, such as sync.timeout_s=\d"),
        ("parallel.pipeline.micro_batches=x", "must be a number, such as parallel.pipeline.micro_batches=4"),
        ("sync.chunk_bytes=8MB", "must be a number of bytes, such as sync.chunk_bytes=8000000"),
        (
            "recompute.modules=model.blocks.*",
            r"recompute.modules is a list: write 'recompute.modules=\[model.blocks.\*\]'",
        ),
        ("ckpt_path=a/epoch=0-step=6.ckpt", "cannot be read: .* \"ckpt_path='a/epoch=0-step=6.ckpt'\""),
    ],
)
def test_values_of_the_wrong_type_say_what_to_write(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_store.check_overrides([argument])


@pytest.mark.parametrize(
    "argument",
    [
        *("sync.timeout_s=60", "sync.timeout_s=1e3", "recompute.budget=8GB", "recompute.modules=[Block,model.*]"),
        *(
            "trainer.devices=auto",
            "+sync.timeout_s=${x}",
            "sync=flat,bf16",
            "sync.chunk_bytes=choice(1,2)",
            "~sync=flat",
        ),
        *("optimizer.lr=0.1", "sample_prompt='a=b'", "topology.hosts={a: [0]}", "trainer.max_epochs=null"),
    ],
)
def test_values_of_the_right_type_pass(argument: str) -> None:
    config_store.check_overrides([argument])


@pytest.mark.parametrize(("group", "name"), [("topology", "three_tier"), ("recompute", "budget")])
def test_names_that_need_values_say_which(group: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"needs {group}\."):
        config.resolve(group, name, *PRESETS[group])


@pytest.mark.parametrize(
    ("config_type", "options", "said"),
    [
        (config.TensorConfig, {"size": 2.0}, r"parallel.tensor.size=2.0 ranks: must be a whole number, e.g. 2"),
        (config.TensorConfig, {"loss_parallel": "no"}, r"parallel.tensor.loss_parallel='no' \(str\): must be true or"),
        (ParallelConfig, {"prefetch": 1.5}, r"parallel.prefetch=1.5 blocks: must be a whole number"),
        (ParallelConfig, {"find_unused_parameters": "false"}, "parallel.find_unused_parameters='false'"),
        (ParallelConfig, {"tensor": "gpt"}, r"parallel.tensor='gpt': must be a mapping of the options size, plan"),
        (ParallelConfig, {"tensor": None}, "parallel.tensor=None: must be a mapping"),
        (RecomputeConfig, {"mode": "every_n", "every": 2.0}, "recompute.every=2.0 blocks: must be a whole number"),
        (RecomputeConfig, {"mode": "full", "modules": [1]}, "recompute.modules is a list of class names"),
    ],
)
def test_values_of_another_type_are_refused_before_anything_starts(
    config_type: type, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config_type(**options)
