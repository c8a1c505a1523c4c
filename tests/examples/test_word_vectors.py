"""examples/word_vectors.py as a user runs it."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.support.fresh import run_script
from tests.support.processes import REPO_ROOT
from tests.support.sweeps import sampled

SCRIPT = REPO_ROOT / "examples" / "word_vectors.py"


ANIMALS = ["cat", "dog", "horse", "mouse", "goat", "hen"]
TOOLS = ["hammer", "saw", "drill", "plane", "chisel", "file"]


def text_of(sentences: int) -> str:
    """Animals do what animals do, tools what tools do, so that each word's neighbours are known."""
    draw = random.Random(0)
    kinds = [
        (ANIMALS, ["eats", "sleeps", "runs"], ["hay", "grass", "corn"], ["meadow", "stable", "yard"]),
        (TOOLS, ["cuts", "bends", "smooths"], ["wood", "steel", "brass"], ["workshop", "bench", "factory"]),
    ]
    return "\n".join("the {} {} {} in the {}.".format(*map(draw.choice, draw.choice(kinds))) for _ in range(sentences))


SCHEMES = {
    "rows": ([], 0, r"the gradient of {}\.weight .* goes "),
    "served": (["sync=parameter_server"], 0, r"the rows of {}\.weight .* are dealt to 2 ranks"),
    "stale": (
        ["sync=parameter_server", "sync.parameter_server.staleness=4"],
        1,  # gradients that come 4 steps late learn less in as many steps
        r"the rows of {}\.weight .* are dealt to 2 ranks",
    ),
}


@pytest.mark.parametrize(("options", "allowed", "way"), sampled(SCHEMES, ["rows"]))
def test_it_learns_which_words_are_near(tmp_path: Path, options: list[str], allowed: int, way: str) -> None:
    (tmp_path / "text.txt").write_text(text_of(6000))
    short = ["path=text.txt", "max_steps=300", "width=16", "batch_size=256", "show=[dog,saw]"]
    result = run_script([SCRIPT, *short, *options], cwd=tmp_path, deadline_s=150, env={"COLUMNS": "160"}).check()
    (loss,) = re.findall(r"Nearest of [\d,]+ words, loss ([\d.]+)", result.stdout)
    assert float(loss) < 4.0, "6 ln 2 = 4.16 at the start"
    near = dict(re.findall(r"│ (\w+) +│ ([^│]+)", result.stdout))
    for word, own, other in (("dog", ANIMALS, TOOLS), ("saw", TOOLS, ANIMALS)):
        found = re.findall(r"[a-z]+", near[word])
        assert len(found) == 5
        assert len(set(found) & set(own)) >= 2
        assert len(set(found) & set(other)) <= allowed
    said = result.stdout + result.stderr
    for name in ("words", "contexts"):
        assert len(re.findall(way.format(name), said)) == 1
