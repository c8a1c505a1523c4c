"""docs/configuration.md says what the dataclasses and the YAML files say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_configuration", ROOT / "docs/generate_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(generator: ModuleType) -> None:
    assert generator.page() == generator.PAGE.read_text(), "run: python docs/generate_configuration.py"


def test_page_has_every_group(generator: ModuleType) -> None:
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and list(path.glob("*.yaml"))}
    assert groups == {*generator.GROUPS, "experiment"}
