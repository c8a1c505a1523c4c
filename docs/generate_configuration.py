"""Writes docs/configuration.md from the config dataclasses and the YAML files, so that the page stays true.

Run from the repository: ``python docs/generate_configuration.py``. A test compares the page with what this makes.
"""

import dataclasses
import inspect
import re
from pathlib import Path

from lightning_dist.config_store import SCHEMAS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"

GROUPS = {  # group -> names of its schemas
    "parallel": ("parallel",),
    "sync": ("sync",),
    "topology": ("topology",),
    "recompute": ("recompute",),
    "data": ("data_sharded", "data_text", "data_synthetic"),
    "model": ("model_gpt", "model_mlp"),
    "optimizer": ("optimizer_adamw", "optimizer_sgd"),
    "trainer": ("trainer",),
    "checkpoint": ("checkpoint",),
    "elastic": ("elastic",),
    "monitor": ("monitor",),
}

HEAD = """\
# Configuration

<!-- Written by docs/generate_configuration.py; edit the docstrings and YAML comments it reads. -->

A run is put together from groups: each has options, files in `conf/` that Hydra composes, and each option has values
that can be overridden one by one.

```
python examples/train.py sync=bf16 topology=two_tier trainer.max_steps=1000
python examples/train.py -m sync=flat,hierarchical,bf16
python examples/train.py experiment=quick
python examples/train.py --cfg job
```

The dataclasses in `lightning_dist/config/` and `lightning_dist/run_config/` are the schema: a name that does not
exist and a value that cannot be used are refused, with those that can, before any process starts. The same dataclasses
are the arguments of the strategy without Hydra: `HierDistStrategy(sync="bf16")` or
`HierDistStrategy(sync=SyncConfig(...))`.

On a command line, quote what the shell would read, and what Hydra would:
`"ckpt_path='outputs/train/checkpoints/epoch=0-step=6.ckpt'"`, `'topology.switches={rack1: [a, b], rack2: [c, d]}'`.
In YAML files write `"off"` with quotes; without them YAML reads it as false.

## In an application of your own

The groups travel in the package. Put it on Hydra's search path; the schemas come with it.

```yaml
defaults:
  - sync: hierarchical
  - topology: auto
  - parallel: ddp
  - recompute: "off"
  - _self_

hydra:
  searchpath:
    - pkg://lightning_dist.conf
```

```python
strategy = HierDistStrategy(parallel=cfg.parallel, sync=cfg.sync, topology=cfg.topology, recompute=cfg.recompute)
```

A value that cannot be used is a `lightning_dist.errors.ConfigError` (a `ValueError`), whose message is made to be shown
without a traceback: `except ConfigError as error: sys.exit(str(error))`, as `examples/train.py` does.

A group may be placed elsewhere: `- sync@training.gradients: bf16` puts it under `cfg.training.gradients`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## The root config\n", "`conf/train.yaml`; the groups below are its other keys.\n"]
    parts.append(_table(SCHEMAS["run"], "", skip=tuple(GROUPS)))
    for group, schemas in GROUPS.items():
        parts.append(f"## `{group}`\n")
        parts.append(_choices(group))
        for name in schemas:
            schema = SCHEMAS[name]
            parts.append(f"{_summary(schema)}\n")
            parts.append(_table(schema, f"{group}."))
    parts.append("## `experiment`\n")
    parts.append("Overlays: several choices and values under one name, laid over all of the above.\n")
    parts.append(_choices("experiment"))
    return "\n".join(parts)


def options(schema: type, prefix: str) -> list[tuple[str, str, str, str]]:
    """Every option of a schema as (dotted name, type, default, meaning); nested schemas are opened up."""
    meanings = {name: said for base in reversed(schema.__mro__) for name, said in _meanings(base).items()}
    rows: list[tuple[str, str, str, str]] = []
    for field in dataclasses.fields(schema):
        name = f"{prefix}{field.name}"
        if isinstance(field.default_factory, type) and dataclasses.is_dataclass(field.default_factory):
            rows += options(field.default_factory, f"{name}.")
        else:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            rows.append((name, str(field.type), _yaml(default), meanings[field.name]))
    return rows


def _choices(group: str) -> str:
    lines = []
    for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
        comment = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
        text = " ".join(line for line in comment if not line.startswith("@package"))
        text = re.sub(r"\s*Options and units: \S+\.yaml\.", "", text)
        lines.append(f"- `{group}={path.stem}`: {text}")
    return "\n".join(lines) + "\n"


def _table(schema: type, prefix: str, skip: tuple[str, ...] = ()) -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name, _, default, meaning in options(schema, prefix):
        if name.split(".")[0] not in skip or prefix:
            lines.append(f"| `{name}` | `{default}` | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _summary(schema: type) -> str:
    return (inspect.getdoc(schema) or "").split("\n\n")[0].replace("``", "`").replace("\n", " ")


def _meanings(schema: type) -> dict[str, str]:
    """The Attributes section of a class's docstring."""
    section = (inspect.getdoc(schema) or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for name, text in re.findall(r"^    (\w+): ((?:.*\n?)(?:^      .*\n?)*)", section, flags=re.MULTILINE):
        plain = " ".join(text.split()).replace("``", "`").replace("`None`", "`null`")
        found[name] = plain
    return found


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
