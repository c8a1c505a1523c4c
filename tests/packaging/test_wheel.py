"""The wheel brings the Hydra groups: in an empty environment, every option of every group composes from it.

The environment sees the third-party packages of the one that runs the tests (so that torch is not installed again), but
neither the repository nor its editable install.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GROUPS = [
    [f"{folder.name}={path.stem}" for path in sorted(folder.glob("*.yaml"))]
    for folder in sorted((ROOT / "conf").iterdir())
    if folder.is_dir() and list(folder.glob("*.yaml"))
]
OPTIONS = [[option for option in row if option] for row in itertools.zip_longest(*GROUPS)]
"""Rows with at most one option of each group; each option is in one of them."""

APP = """
import hydra
from omegaconf import DictConfig, OmegaConf

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config: DictConfig) -> None:
    print(OmegaConf.to_yaml(config, resolve=True))

if __name__ == "__main__":
    main()
"""

APP_YAML = """
defaults:
  - sync: hierarchical
  - topology: auto
  - parallel: ddp
  - recompute: "off"
  - data: sharded
  - model: gpt-tiny
  - optimizer: adamw
  - trainer: default
  - checkpoint: full
  - elastic: "off"
  - monitor: "on"
  - sync@training.gradients: bf16
  - _self_
  - experiment: null

hydra:
  searchpath:
    - pkg://lightning_dist.conf
  run:
    dir: .
  output_subdir: null
mine: 1
"""

# Composes each row of options twice: under the package's root config, and in an app that has only the search path.
COMPOSE = """
import json, sys
import lightning_dist
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import OmegaConf

app, rows = json.loads(sys.argv[1])
done = []
with initialize_config_dir(app, version_base="1.3"):
    for row in rows:
        OmegaConf.to_container(compose("app", overrides=row), resolve=True)
        done.append(["app", *row])
with initialize_config_module("lightning_dist.conf", version_base="1.3"):
    for row in rows:
        OmegaConf.to_container(compose("train", overrides=row), resolve=True)
        done.append(["train", *row])
print(json.dumps({"file": lightning_dist.__file__, "done": done}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: building leaves folders beside the sources."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, sources)
    for name in ("lightning_dist", "conf"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(sources)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    interpreter = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(interpreter), "install"]
    command += ["--no-index", "--no-deps", str(wheel)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    # A folder named in a .pth file joins the path, but .pth files in it are not read: no editable install gets through.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = folder / "lib" / version / "site-packages"
    third_party = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "third_party.pth").write_text("\n".join(sorted(third_party)) + "\n")
    return interpreter


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The folder of a Hydra application that knows the library by its search path only."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "app.yaml").write_text(APP_YAML)
    return tmp_path


def test_wheel_holds_what_it_should(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
        entry_points = archive.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode()
    yaml = {f"lightning_dist/conf/{p.relative_to(ROOT / 'conf')}" for p in (ROOT / "conf").rglob("*.yaml")}
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_dist").rglob("*.py")}
    assets = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_dist/monitor/report/assets").iterdir()}
    assert len(assets) >= 5
    assert yaml | code | assets | {"lightning_dist/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "conf", "examples", "benchmarks"))]
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: <3.14,>=3.10" in metadata
    assert "hierdist = lightning_dist.cli:main" in entry_points


def test_every_option_of_every_group_composes_from_the_wheel(python: Path, app: Path) -> None:
    result = subprocess.run(
        [python, "-I", "-c", COMPOSE, json.dumps([str(app), OPTIONS])],
        capture_output=True,
        text=True,
        cwd=app,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert Path(report["file"]).is_relative_to(python.parents[1])
    assert report["done"] == [[config, *row] for config in ("app", "train") for row in OPTIONS]


def test_application_reaches_the_groups_by_its_search_path(python: Path, app: Path) -> None:
    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, str(app / "app.py"), *overrides], capture_output=True, text=True, cwd=app, timeout=60
        )

    good = run("sync=flat", "sync.timeout_s=30", "training.gradients.max_in_flight=3")
    assert good.returncode == 0, good.stderr
    assert "algorithm: flat" in good.stdout
    assert "timeout_s: 30.0" in good.stdout
    assert "max_in_flight: 3" in good.stdout
    bad = run("sync=hierarchic")
    assert bad.returncode != 0
    assert "Available options in 'sync':\n\tauto\n\tbf16\n\tflat\n\thierarchical\n" in bad.stderr
