"""Public names and options change by decision only: with the snapshot, and a line in CHANGELOG.md."""

import subprocess
import sys

from tests.architecture import frozen

ADVICE = "if the change is meant: python -m tests.architecture.frozen, and say so in CHANGELOG.md"


def test_options_are_those_decided_on() -> None:
    assert frozen.options() == frozen.OPTIONS_FILE.read_text(), ADVICE


def test_public_names_are_those_decided_on() -> None:
    assert frozen.public_names() == frozen.NAMES_FILE.read_text(), ADVICE


def test_public_names_exist() -> None:
    code = (
        "import lightning_dist as l; missing = [n for n in l.__all__ if not hasattr(l, n)]; assert not missing, missing"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=frozen.ROOT, timeout=100)
    assert result.returncode == 0, result.stderr
