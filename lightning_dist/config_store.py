"""Makes the options known to Hydra: the dataclasses become schemas that the YAML files in ``conf/`` compose against.

The schemas sit in one group of their own, ``hierdist_schema``, so that the options Hydra lists for a group (in
``--help`` and in errors) are those a user can choose.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, OmegaConf

from lightning_dist.config import (
    ElasticConfig,
    MonitorConfig,
    ParallelConfig,
    RecomputeConfig,
    SyncConfig,
    TopologyConfig,
    parse_bytes,
)
from lightning_dist.errors import ConfigError, UnknownOptionError, unknown_key
from lightning_dist.run_config import (
    AdamWConfig,
    GPTConfig,
    MLPConfig,
    RunCheckpointConfig,
    RunConfig,
    SGDConfig,
    ShardedDataConfig,
    SyntheticDataConfig,
    TextDataConfig,
    TrainerConfig,
)

SCHEMA_GROUP = "hierdist_schema"
SEARCH_PATH = "pkg://lightning_dist.conf"

SCHEMAS: dict[str, type] = {
    "run": RunConfig,
    "parallel": ParallelConfig,
    "sync": SyncConfig,
    "topology": TopologyConfig,
    "recompute": RecomputeConfig,
    "data_sharded": ShardedDataConfig,
    "data_text": TextDataConfig,
    "data_synthetic": SyntheticDataConfig,
    "model_gpt": GPTConfig,
    "model_mlp": MLPConfig,
    "optimizer_adamw": AdamWConfig,
    "optimizer_sgd": SGDConfig,
    "trainer": TrainerConfig,
    "checkpoint": RunCheckpointConfig,
    "elastic": ElasticConfig,
    "monitor": MonitorConfig,
}

# In the root config these are filled by their groups; their defaults would mix with the chosen option's.
_GROUPS_OF_SEVERAL_SCHEMAS = ("data", "model", "optimizer")


def register() -> None:
    """Put the schemas into Hydra's ConfigStore. Safe to call again.

    An application that has ``pkg://lightning_dist.conf`` on its search path need not call it: Hydra imports that
    package, which does.
    """
    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(group=SCHEMA_GROUP, name=name, node=_schema_node(schema), provider="lightning_dist")


def to_run_config(config: DictConfig) -> RunConfig:
    """Turn a composed root config (``train.yaml``) into checked values.

    Raises:
        ConfigError: A value is out of range, unknown, or does not go with another; the message lists what is allowed.
    """
    try:
        run = OmegaConf.to_object(config)
    except dataclasses.FrozenInstanceError as error:  # a key that is no field, forced in with `+`
        raise UnknownOptionError(f"the config has a key that is no option ({error})") from error
    if not isinstance(run, RunConfig):
        raise TypeError(f"expected a config composed from train.yaml, got {type(run).__name__}")
    return run


def check_overrides(arguments: Sequence[str]) -> None:
    """Check the names on the command line of an application whose root config is ``train.yaml``.

    Hydra refuses an unknown option of a group too, but does not say which ones there are, and a value of the wrong
    type, but not what to write. Options whose group has several schemas (``model.``, ``data.``, ``optimizer.``) may be
    those of any of them; Hydra checks the rest.

    Args:
        arguments: What follows the script's name: overrides, flags and anything else; only overrides are looked at.

    Raises:
        UnknownOptionError: A name is no option; the message lists the right ones.
        ConfigError: A value is of another type than the option, or cannot be read.
    """
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        if match:
            field = _field_of(match["key"].split("."))
            _check_value(argument, match["key"], field)


_OVERRIDE = re.compile(r"(\+{1,2}|~)?(?P<key>[A-Za-z_]\w*(\.\w+)*)=")


def _field_of(path: list[str]) -> dataclasses.Field[Any] | None:
    """The option that a dotted name is, if it is one of one schema only."""
    first, *rest = path
    if first == "hydra":
        return None
    groups = {name: [schema] for name, schema in SCHEMAS.items() if name != "run"}
    for group in _GROUPS_OF_SEVERAL_SCHEMAS:
        groups[group] = [schema for name, schema in SCHEMAS.items() if name.startswith(f"{group}_")]
    names = [field.name for field in dataclasses.fields(RunConfig)]
    if first not in (*names, "experiment"):
        raise unknown_key(first, "the run", [*names, "experiment"])
    schemas, what, field = groups.get(first, []), first, None
    for name in rest:
        fields = {field.name: field for schema in schemas for field in dataclasses.fields(schema)}
        if not fields:
            return None  # below an option that is a mapping of the user's own names, e.g. topology.hosts
        if name not in fields:
            raise unknown_key(f"{what}.{name}", what, fields)
        field = fields[name]
        nested, what = field.default_factory, f"{what}.{name}"
        schemas = [nested] if isinstance(nested, type) and dataclasses.is_dataclass(nested) else []
    return field if len(groups.get(first, [])) == 1 else None


def _check_value(argument: str, key: str, field: dataclasses.Field[Any] | None) -> None:
    """Refuse what Hydra cannot read, and words where a number or a list is wanted."""
    try:
        value = OverridesParser.create().parse_override(argument).value()
    except HydraException as error:
        written = argument.partition("=")[2]
        raise ConfigError(
            f"{argument} cannot be read: {str(error).splitlines()[0]}. A value with = or other signs of Hydra's goes "
            f"in quotes, and those in quotes of the shell: \"{key}='{written}'\""
        ) from error
    if field is None or not isinstance(value, str | QuotedString) or "${" in str(value):
        return
    kind, text = str(field.type), str(getattr(value, "text", value))
    if kind.startswith("list"):
        raise ConfigError(f"{key} is a list: write '{key}=[{text}]'")
    if re.fullmatch(r"(int|float)( \| None)?", kind):
        unit = next((f" of {unit}" for end, unit in _UNITS.items() if key.endswith(end)), "")
        raise ConfigError(f"{key}={text}: must be a number{unit}, such as {_example(key, text, field)}")


_UNITS = {"_s": "seconds", "_bytes": "bytes"}


def _example(key: str, text: str, field: dataclasses.Field[Any]) -> str:
    if key.endswith("_bytes"):
        try:
            return f"{key}={parse_bytes(key, text)}"
        except ConfigError:
            pass
    default = field.default
    if default is None:
        default = 0.5 if str(field.type).startswith("float") else 4
    return f"{key}={default}"


def _schema_node(schema: type) -> DictConfig:
    node = DictConfig(OmegaConf.structured(schema))
    if schema is RunConfig:
        OmegaConf.set_readonly(node, None)
        for group in _GROUPS_OF_SEVERAL_SCHEMAS:
            node[group] = "???"
    _make_writable(node)
    return node


def _make_writable(node: DictConfig) -> None:
    """Let YAML and the command line write into a schema.

    Frozen dataclasses become read-only nodes. And a node of type ``dict | None`` that is None cannot be overridden by a
    mapping on Hydra's command line (OmegaConf 2.3: AttributeError in ``update``), so it becomes an untyped one.
    """
    OmegaConf.set_readonly(node, None)
    for key in node:
        child = node._get_node(key)
        if not isinstance(child, DictConfig):
            continue
        if child._is_none():
            node.__dict__["_content"][key] = AnyNode(None, key=key, parent=node)
        elif not child._is_missing():
            _make_writable(child)
