"""``hierdist ab`` around a script that writes down what it is told to, in milliseconds."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_dist.cli import main
from lightning_dist.experiment.running import last_words

# A run of "lr": its loss falls the faster the larger it is; larger than 1 it ends with an error, "lost" with NaN.
SCRIPT = """
import json, os, random, sys
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv[1:])
steps, seed, lr = int(given["trainer.max_steps"]), int(given["seed"]), given.get("lr", "0.1")
with open("runs.txt", "a") as log:
    print(lr, seed, file=log)
print("hello from", seed)
if lr == "wild" and (seed == 1 or Path("always").exists()):
    print("Traceback (most recent call last):")
    sys.exit("ValueError: this learning rate does not work")
noise = random.Random(seed)
file = open(Path(os.environ["HIERDIST_CURVE"]) / "curve-rank-00000.jsonl", "w")
def say(**line):
    print(json.dumps(line), file=file)
say(kind="start", version=1, rank=0, world_size=1, nodes=1)
for step in range(1, steps + 1):
    loss = 4 + noise.gauss(0, 0.1) - (0 if lr == "wild" else float(lr)) * (step - 1) / steps
    say(kind="step", step=step, seconds=step * 0.1, loss=float("nan") if lr == "0.99" else loss, crc=seed)
say(kind="end", step=steps)
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def ab(*words: str, a: str = "lr=0.1", b: str = "lr=0.101", steps: int = 40, script: str = "train.py") -> int:
    given = ["ab", "--a", a, "--b", b, "--steps", str(steps), "-o", "out", *words, "--", sys.executable, script]
    return main(given)


def runs() -> list[str]:
    return Path("runs.txt").read_text().splitlines()


class Page(HTMLParser):
    """What a page asks others for, and whether its elements are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_arms_that_are_alike_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    assert ab("--seeds", "3") == 0
    out = capsys.readouterr().out
    assert "safe here" in out
    assert "loss at equal time" in out
    assert runs() == ["0.1 0", "0.101 0", "0.101 1", "0.1 1", "0.1 2", "0.101 2"]
    page = Page()
    text = Path("out/report.html").read_text()
    page.feed(text)
    assert page.links == ["data:,"]
    assert page.open == []
    assert text.count("<svg") == 3
    result = json.loads(Path("out/result.json").read_text())
    assert result["seeds"] == [0, 1, 2]
    assert result["judgement"]["answer"] == "safe here"


def test_a_worse_arm_is_not_safe() -> None:
    assert ab("--seeds", "3", a="lr=0.9") == 1


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ab("--seeds", "2", "--json") in (0, 3)
    assert json.loads(capsys.readouterr().out)["steps"] == 40


def test_one_pair_warns_and_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert ab("--seeds", "1") == 3
    assert "one pair shows no spread" in capsys.readouterr().err


def test_runs_that_are_done_are_kept_and_more_seeds_are_added() -> None:
    ab("--seeds", "2")
    ab("--seeds", "3")
    assert len(runs()) == 6
    ab("--seeds", "3")
    assert len(runs()) == 6
    ab("--seeds", "2", "--fresh")
    assert len(runs()) == 10


def test_runs_of_a_are_taken_from_another_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    ab("--seeds", "2")
    capsys.readouterr()
    ab("--seeds", "3", "--a-from", "out", "-o", "second", b="lr=0.102")
    assert runs()[4:] == ["0.102 0", "0.102 1", "0.1 2", "0.102 2"]
    assert "taken from another experiment (seeds 0, 1)" in capsys.readouterr().out
    first, second = (json.loads(Path(f"{folder}/result.json").read_text()) for folder in ("out", "second"))
    assert [len(result["notes"]) for result in (first, second)] == [0, 1]
    ab("--seeds", "3", "--a-from", "out", "-o", "second", b="lr=0.102")
    assert len(runs()) == 8, "all are done"


def test_runs_of_another_kind_are_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    ab("--seeds", "2")
    assert ab("--seeds", "2", "--a-from", "out", "-o", "second", a="lr=0.2") == 2
    assert "a is lr=0.1 there, and lr=0.2 here" in capsys.readouterr().err
    assert ab("--seeds", "2", "--a-from", ".", "-o", "third") == 2
    assert "is no folder of a hierdist ab" in capsys.readouterr().err
    assert len(runs()) == 4


def test_a_run_that_was_cut_short_is_run_anew() -> None:
    ab("--seeds", "2")
    Path("out/b-seed1/outcome.json").unlink()
    ab("--seeds", "2")
    assert runs()[4:] == ["0.101 1"]


def test_a_crash_is_shown_and_loses_no_other_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert ab("--seeds", "3", b="lr=wild", a="lr=0.0") == 0
    out = capsys.readouterr().out
    assert "b-seed1: it ended with status 1" in out
    assert "ValueError: this learning rate does not work" in out
    assert "b-seed1 is left out" in out
    assert json.loads(Path("out/result.json").read_text())["seeds"] == [0, 2]
    assert "this learning rate" in Path("out/report.html").read_text()
    ab("--seeds", "3", b="lr=wild", a="lr=0.0")
    assert runs()[6:] == ["wild 1"], "what failed is tried again"


def test_an_arm_that_never_works_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    Path("always").touch()
    assert ab("--seeds", "5", b="lr=wild") == 2
    assert runs() == ["0.1 0", "wild 0", "wild 1"]
    assert "the rest is not tried" in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_not_safe() -> None:
    assert ab("--seeds", "2", b="lr=0.99") == 1
    assert "not safe" in Path("out/report.html").read_text()


def test_a_run_that_takes_too_long_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    Path("slow.py").write_text("import time\nprint('begins', flush=True)\ntime.sleep(100)\n")
    assert ab("--seeds", "1", "--run-minutes", "0.02", script="slow.py") == 2
    assert "it took more than 1.2 s, and was ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "a", "message"),
    [
        (["--margin", "1"], "lr=0.1", "write 1%"),
        (["--seeds", "0"], "lr=0.1", "--seeds must be at least 1"),
        (["--run-minutes", "nan"], "lr=0.1", "--run-minutes must be a positive number"),
        (["--output", "s3://bucket/ab"], "lr=0.1", "is a URL"),
        ([], "lr=0.101", "are the same"),
        ([], "seed=4", "--a sets seed"),
    ],
    ids=["margin", "seeds", "minutes", "url", "same", "seed"],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], words: list[str], a: str, message: str
) -> None:
    assert ab(*words, a=a) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs.txt").exists()
    assert not Path("out").exists()


def test_unknown_overrides_of_our_scripts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    script = str(Path(__file__).parents[3] / "examples" / "train.py")
    assert ab(a="sync=hierarchical", b="sync=bf17", script=script) == 2
    err = capsys.readouterr().err
    assert "--b (sync=bf17): it cannot be composed" in err
    assert "hierarchical" in err
    assert ab(a="sync=hierarchical", b="optimizer.lrr=3", script=script) == 2
    assert "Did you mean lr?" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_program_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "--a", "x=1", "--b", "x=2", "--", "no-such-program"]) == 2
    assert "no-such-program is no program" in capsys.readouterr().err


def test_last_words_have_the_error_that_came_before_much_else(tmp_path: Path) -> None:
    output = tmp_path / "output.log"
    noise = "".join(f"line {number}\n" for number in range(40))
    output.write_text("\x1b[31mValueError: why\x1b[0m\n10 %\r20 %\rall\n" + noise)
    words = last_words(output)
    assert words[:2] == ("ValueError: why", "...")
    assert words[-1] == "line 39"
    output.write_text("10 %\r20 %\rall\n")
    assert last_words(output) == ("all",)
