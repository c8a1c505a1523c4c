"""What the README tells people to write works as it stands."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from lightning_dist import cli
from tests.support.fresh import run_script

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
EXPRESSIONS = sorted({span for span in SPANS if span.startswith(("Trainer(", "HierDistStrategy("))})
COMMANDS = sorted({span for span in SPANS if span.startswith("hierdist topology")})
PREAMBLE = """
from datetime import timedelta
import lightning_dist
from lightning.pytorch import Trainer
from lightning_dist import HierDistStrategy
"""


def test_there_is_something_to_test() -> None:
    assert BLOCKS
    assert EXPRESSIONS
    assert COMMANDS


def test_python_blocks_and_expressions_run(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join([*BLOCKS, PREAMBLE, *EXPRESSIONS, "print('all of it ran')"]))
    assert "all of it ran" in run_script([sys.executable, str(script)], deadline_s=60).check().output


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(command)[1:]) == 0
    assert "hierarchical" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parents[2]
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (root / target).exists()] == []


def test_the_picture_of_a_report_says_what_the_report_says() -> None:
    root = Path(__file__).parents[2]
    (found,) = re.findall(r"\[!\[([^]]*)\]\((docs/report/[^)]*\.png)\)\]\((docs/report/[^)]*\.html)\)", README)
    said, picture, report = found
    page = (root / report).read_text()
    cause, share = re.fullmatch(r"(.*), (\d+ %) of the step.*", said).groups()  # type: ignore[union-attr]
    assert f'<p class="said">{cause}</p>' in page
    assert f"<dd>{share}</dd>" in page
    assert not re.search(r"/(tmp|home|work|root)/", page), "a path of the machine that made it"
    assert (root / picture).stat().st_size < 200_000
    assert (root / report).stat().st_size < 400_000
