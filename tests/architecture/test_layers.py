"""The layers hold: who imports whom, what the base needs, what is packaged."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_dist"

BASE = ("errors", "config", "run_config", "events", "laws", "capabilities", "retry")
# Pure by contract (DESIGN: plain values only); `topology.discover` and `topology.probe` talk to the world.
PURE = (
    *("topology.spec", "topology.layout", "planning.memory_cost", "planning.activation_cost"),
    *(f"checkpoint.{name}" for name in ("pieces", "coverage", "crc", "manifest", "retention", "shard_stream")),
)


def _exists(module: str) -> bool:
    path = PACKAGE / module.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_imports_go_one_way() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    result = subprocess.run([linter, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", [module for module in BASE + PURE if _exists(module)])
def test_base_is_imported_without_torch(module: str) -> None:
    # The package's own __init__ registers the strategy, which needs torch; the module is loaded under an empty parent.
    code = f"""
import sys, types
for blocked in ("torch", "lightning", "numpy"):
    sys.modules[blocked] = None  # importing it raises
for part in ("", ".topology", ".planning", ".checkpoint"):
    name = f"lightning_dist{{part}}"
    parent = types.ModuleType(name)
    parent.__path__ = [{str(PACKAGE)!r} + part.replace(".", "/")]
    sys.modules[name] = parent
import lightning_dist.{module}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def _setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_package_is_listed_in_setup_cfg() -> None:
    code = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}
    conf = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "conf").rglob("__init__.py")}
    listed = set(_setup_cfg()["options"]["packages"].split())
    assert listed == code | {f"lightning_dist.{name}" for name in conf}


def test_every_folder_with_yaml_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "conf").rglob("*.yaml")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_conf_folders_are_mapped_to_their_packages() -> None:
    mapping = dict(line.split(" = ") for line in _setup_cfg()["options"]["package_dir"].strip().splitlines())
    conf = {path.parent.relative_to(ROOT) for path in (ROOT / "conf").rglob("__init__.py")}
    expected = {f"lightning_dist.{'.'.join(path.parts)}": path.as_posix() for path in conf}
    assert {name: path for name, path in mapping.items() if name != "lightning_dist"} == expected


def test_direct_dependencies_are_pinned() -> None:
    options = _setup_cfg()
    extras = options["options.extras_require"]
    wanted = options["options"]["install_requires"].split() + extras["dev"].split() + extras["ray"].split()
    pinned = {
        line.partition("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    assert {re.split(r"[>\[]", name)[0] for name in wanted} == pinned
