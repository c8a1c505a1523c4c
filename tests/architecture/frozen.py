"""What users may rely on, as text: the public names and every option with its type and default.

``python -m tests.architecture.frozen`` rewrites the snapshots beside this file, once a change has been decided on.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

from lightning_dist.config_store import SCHEMAS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OPTIONS_FILE = HERE / "options.txt"
NAMES_FILE = HERE / "public_names.txt"


def options() -> str:
    """Every option of every schema, one a line."""
    return "".join(f"{line}\n" for name, schema in SCHEMAS.items() for line in _fields(schema, name))


def public_names() -> str:
    """``lightning_dist.__all__``, one name a line, read without importing the package."""
    tree = ast.parse((ROOT / "lightning_dist" / "__init__.py").read_text())
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return "".join(f"{name}\n" for name in sorted(ast.literal_eval(node.value)))
    raise AssertionError("lightning_dist/__init__.py has no literal __all__")


def _fields(schema: type, prefix: str) -> list[str]:
    lines = []
    for field in dataclasses.fields(schema):
        name = f"{prefix}.{field.name}"
        nested = field.default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            lines += [f"{name}: {nested.__name__}"] if prefix == "run" else _fields(nested, name)
        else:
            default = field.default if nested is dataclasses.MISSING else nested()
            lines.append(f"{name}: {field.type} = {default!r}")
    return lines


if __name__ == "__main__":
    OPTIONS_FILE.write_text(options())
    NAMES_FILE.write_text(public_names())
