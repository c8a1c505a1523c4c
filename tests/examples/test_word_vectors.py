"""examples/word_vectors.py as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.fresh import run_script
from tests.support.processes import REPO_ROOT

SCRIPT = REPO_ROOT / "examples" / "word_vectors.py"


def test_it_learns_which_words_are_near(tmp_path: Path) -> None:
    short = ["max_steps=500", "width=32", "batch_size=512", "show=[true,raised]"]
    result = run_script([SCRIPT, *short], cwd=tmp_path, deadline_s=150, env={"COLUMNS": "160"}).check()
    (loss,) = re.findall(r"Nearest of [\d,]+ words, loss ([\d.]+)", result.stdout)
    assert float(loss) < 3.0, "6 ln 2 = 4.16 at the start"
    near = dict(re.findall(r"│ (\w+) +│ ([^│]+)", result.stdout))
    assert "false" in near["true"]
    assert "exception" in near["raised"]
    said = result.stdout + result.stderr
    for name in ("words", "contexts"):
        assert len(re.findall(rf"the gradient of {name}\.weight \(\d+ x 32\) goes ", said)) == 1
