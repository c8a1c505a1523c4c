"""Settings that do nothing are named, with what to write instead; all others pass in silence."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dist.capabilities import refuse_combinations, without_effect
from lightning_dist.config import (
    PARALLEL_MODES,
    LocalSGDConfig,
    ParallelConfig,
    ParameterServerConfig,
    PipelineConfig,
    ProbeConfig,
    RecomputeConfig,
    SparseConfig,
    SyncConfig,
    TensorConfig,
    TopologyConfig,
)
from lightning_dist.errors import CombinationError

SWITCHES = {"x": ["a"], "y": ["b"]}


@pytest.mark.parametrize(
    ("sync", "topology", "num_hosts", "device", "named"),
    [
        ({}, {"tiers": "flat"}, 2, "cpu", "sync.algorithm=hierarchical"),
        ({"codec": "bf16"}, {}, 1, "cpu", "sync.codec=bf16"),
        ({"codec": "onebit", "rounding": "stochastic"}, {}, 2, "cpu", "sync.rounding"),
        ({"ratio": 0.1}, {}, 2, "cpu", "sync.ratio"),
        ({"error_feedback": False}, {}, 2, "cpu", "sync.error_feedback"),
        ({"gathers": "int8"}, {}, 2, "cpu", "sync.gathers"),
        ({"everywhere": True}, {}, 2, "cpu", "sync.everywhere"),
        ({"everywhere": True, "codec": "int8", "algorithm": "flat"}, {}, 2, "cpu", "sync.everywhere"),
        ({"codec": "bf16", "warmup_steps": 3}, {}, 2, "cpu", "sync.warmup_steps"),
        ({}, {"tiers": "two_tier", "switches": SWITCHES}, 2, "cpu", "topology.switches"),
        ({}, {"probe": ProbeConfig(refresh=True)}, 2, "cpu", "topology.probe.refresh"),
        ({"shared_memory": "off"}, {}, 2, "cuda", "sync.shared_memory"),
    ],
)
def test_a_setting_without_effect_is_named(
    sync: dict[str, Any], topology: dict[str, Any], num_hosts: int, device: str, named: str
) -> None:
    (said,) = without_effect(
        SyncConfig(**sync),
        TopologyConfig(**topology),
        ParallelConfig(),
        RecomputeConfig(),
        num_hosts=num_hosts,
        device_type=device,
    )
    assert said.startswith(named)
    assert "no effect" in said


@pytest.mark.parametrize("codec", ["int8", "onebit", "topk"])
def test_what_is_lost_for_good_is_warned_of(codec: str) -> None:
    sync = SyncConfig(codec=codec, error_feedback=False)
    configs = sync, TopologyConfig(), ParallelConfig(), RecomputeConfig()
    (said,) = without_effect(*configs, num_hosts=2, device_type="cpu")
    assert "lost for good" in said


@pytest.mark.parametrize(
    ("sync", "topology", "num_hosts"),
    [
        ({}, {}, 1),
        ({"codec": "bf16"}, {}, 2),
        ({"codec": "int8", "everywhere": True}, {}, 1),
        ({"codec": "int8", "rounding": "stochastic", "error_feedback": False}, {}, 2),
        ({"algorithm": "flat"}, {"tiers": "flat"}, 2),
        ({"shared_memory": "off"}, {}, 2),
        ({}, {"tiers": "three_tier", "switches": SWITCHES}, 2),
        ({}, {"probe": ProbeConfig(enabled=True, refresh=True)}, 2),
    ],
)
def test_what_works_is_not_warned_of(sync: dict[str, Any], topology: dict[str, Any], num_hosts: int) -> None:
    configs = SyncConfig(**sync), TopologyConfig(**topology), ParallelConfig(), RecomputeConfig()
    assert without_effect(*configs, num_hosts=num_hosts, device_type="cpu") == ()


@pytest.mark.parametrize(
    ("parallel", "device", "named"),
    [
        ({"mode": "zero2", "static_graph": True}, "cpu", "parallel.static_graph"),
        ({"mode": "zero3", "gradient_as_bucket_view": False}, "cpu", "parallel.gradient_as_bucket_view"),
        ({"prefetch": 2}, "cpu", "parallel.prefetch"),
        ({"gather_dtype": "bf16"}, "cpu", "parallel.gather_dtype"),
        ({"mode": "zero3", "cpu_offload": True}, "cpu", "parallel.cpu_offload"),
        ({"cpu_offload": True}, "cuda", "parallel.cpu_offload"),
        ({"mode": "tensor", "static_graph": True}, "cpu", "parallel.static_graph"),
        ({"mode": "tensor", "shard_modules": ["Block"]}, "cpu", "parallel.shard_modules"),
        ({"mode": "zero3", "tensor": TensorConfig(plan="gpt")}, "cpu", "parallel.tensor.plan"),
        ({"tensor": TensorConfig(loss_parallel=True)}, "cpu", "parallel.tensor.loss_parallel"),
    ],
)
def test_options_of_another_mode_are_named(parallel: dict[str, Any], device: str, named: str) -> None:
    configs = SyncConfig(), TopologyConfig(), ParallelConfig(**parallel), RecomputeConfig()
    (said,) = without_effect(*configs, num_hosts=2, device_type=device)
    assert said.startswith(named)


@pytest.mark.parametrize("sparse", [{"exchange": "parameter_server"}, {"dense_above": 0.5}], ids=str)
def test_sparse_gradients_are_those_of_whole_layers(sparse: dict[str, Any]) -> None:
    sync = SyncConfig(sparse=SparseConfig(**sparse))
    said = [
        without_effect(
            sync, TopologyConfig(), ParallelConfig(mode=mode), RecomputeConfig(), num_hosts=2, device_type="cpu"
        )
        for mode in ("tensor", "pipeline", "zero2", "ddp")
    ]
    assert [len(lines) for lines in said] == [1, 1, 0, 0]
    assert "sync.sparse has no effect with layers that are shared by ranks" in said[0][0]
    assert "sync.sparse has no effect with pipeline stages" in said[1][0]
    assert "write parallel=ddp" in said[0][0]


def test_options_of_servers_that_there_are_not_are_said_to_do_nothing() -> None:
    options = ParameterServerConfig(staleness=4)
    said = [
        without_effect(
            SyncConfig(sparse=SparseConfig(exchange=exchange), parameter_server=options),
            TopologyConfig(),
            ParallelConfig(),
            RecomputeConfig(),
            num_hosts=2,
            device_type="cpu",
        )
        for exchange in ("rows", "auto", "parameter_server")
    ]
    assert [len(lines) for lines in said] == [1, 0, 0]
    assert "sync.parameter_server has no effect with sync.sparse.exchange=rows" in said[0][0]


@pytest.mark.parametrize("mode", PARALLEL_MODES)
def test_no_mode_is_warned_of_at_its_defaults(mode: str) -> None:
    configs = SyncConfig(), TopologyConfig(), ParallelConfig(mode=mode), RecomputeConfig()
    assert without_effect(*configs, num_hosts=2, device_type="cuda") == ()


@pytest.mark.parametrize(
    ("recompute", "named"),
    [
        (
            {"mode": "full", "every": 3},
            "recompute.every has no effect with recompute.mode=full; write recompute=every_n",
        ),
        ({"budget": "8GB"}, "recompute.budget has no effect with recompute.mode=off; write recompute=budget"),
        ({"modules": ["Block"]}, "recompute.modules has no effect with recompute.mode=off; write recompute=full"),
    ],
)
def test_options_of_another_recomputation_are_named(recompute: dict[str, Any], named: str) -> None:
    configs = SyncConfig(), TopologyConfig(), ParallelConfig(), RecomputeConfig(**recompute)
    assert without_effect(*configs, num_hosts=2, device_type="cpu") == (named,)


@pytest.mark.parametrize("sync", [{"codec": "int8"}, {"codec": "onebit"}, {"codec": "topk"}, {"gathers": "int8"}])
@pytest.mark.parametrize(
    "parallel",
    [
        {"mode": "tensor", "tensor": TensorConfig(size=2)},
        {"mode": "zero2", "tensor": TensorConfig(size=2)},
        {"mode": "pipeline", "pipeline": PipelineConfig(size=2), "tensor": TensorConfig(size=2)},
    ],
)
def test_blocks_of_split_and_whole_parameters_are_refused(sync: dict[str, Any], parallel: dict[str, Any]) -> None:
    configs = ParallelConfig(**parallel), TopologyConfig(), RecomputeConfig()
    with pytest.raises(CombinationError, match="write sync=bf16"):
        refuse_combinations(*configs, SyncConfig(**sync))
    refuse_combinations(*configs, SyncConfig(codec="bf16"))


# -- local SGD --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sync", "parallel", "num_hosts", "named"),
    [
        ({}, {}, {}, 1, "sync=local_sgd has no effect on one host"),
        ({"outer_momentum": 0.0, "nesterov": False}, {}, {}, 2, "sync.local_sgd.nesterov"),
        ({"overlap_steps": 2, "mixing": 0.0}, {}, {}, 2, "sync.local_sgd.mixing=0"),
        ({}, {"gathers": "int8"}, {"mode": "zero2"}, 2, "sync.gathers=int8"),
        ({}, {}, {"mode": "zero3", "secondary_shard": "host"}, 2, "parallel.secondary_shard=host"),
        ({"every": 4}, {"algorithm": "hierarchical"}, {}, 2, "sync.local_sgd has no effect"),
    ],
)
def test_what_does_nothing_where_hosts_train_apart_is_named(
    options: dict[str, Any], sync: dict[str, Any], parallel: dict[str, Any], num_hosts: int, named: str
) -> None:
    chosen = SyncConfig(**{"algorithm": "local_sgd", "local_sgd": LocalSGDConfig(**options), **sync})
    configs = chosen, TopologyConfig(), ParallelConfig(**parallel), RecomputeConfig()
    (said,) = without_effect(*configs, num_hosts=num_hosts, device_type="cpu")
    assert said.startswith(named)
    assert "write " in said or "leave it out" in said


def test_ranks_of_one_host_may_train_apart() -> None:
    sync = SyncConfig(algorithm="local_sgd", local_sgd=LocalSGDConfig(workers="ranks"))
    configs = sync, TopologyConfig(), ParallelConfig(), RecomputeConfig()
    assert without_effect(*configs, num_hosts=1, device_type="cpu") == ()


@pytest.mark.parametrize(
    ("options", "parallel", "write"),
    [
        ({}, {"mode": "hsdp"}, "write parallel=ddp or zero2"),
        ({}, {"mode": "pipeline"}, "write parallel=ddp or zero2"),
        ({}, {"mode": "zero2", "tensor": TensorConfig(size=2)}, "write parallel=ddp or zero2"),
        ({}, {"mode": "zero3", "cpu_offload": True}, "write parallel.cpu_offload=false"),
        ({"workers": "ranks"}, {"mode": "zero2"}, "write parallel=ddp"),
    ],
)
def test_what_hosts_that_train_apart_cannot_do_is_refused(
    options: dict[str, Any], parallel: dict[str, Any], write: str
) -> None:
    sync = SyncConfig(algorithm="local_sgd", local_sgd=LocalSGDConfig(**options))
    with pytest.raises(CombinationError, match=write.replace(".", r"\.")):
        refuse_combinations(ParallelConfig(**parallel), TopologyConfig(), RecomputeConfig(), sync)


@pytest.mark.parametrize(
    "sync",
    [{"everywhere": True}, {"momentum_correction": 0.9, "codec": "topk"}, {"sparse": SparseConfig(exchange="auto")}],
    ids=str,
)
def test_what_is_of_gradients_between_hosts_is_refused(sync: dict[str, Any]) -> None:
    with pytest.raises(CombinationError, match=r"sync\.algorithm=local_sgd"):
        SyncConfig(algorithm="local_sgd", **sync)
